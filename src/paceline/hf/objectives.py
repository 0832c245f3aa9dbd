"""What a model of a folder learns: one row for each objective."""

from dataclasses import dataclass
from functools import cache

from paceline.errors import TaskError
from paceline.hf.folder import ModelFolder, import_transformers


@dataclass(frozen=True)
class Objective:
    """An objective and the classes of transformers that have it."""

    name: str
    what: str  # the kind of model, for messages
    auto_class: str
    mapping: str  # of model types to classes, in transformers.models.auto.modeling_auto
    is_padded: bool = False  # samples have different lengths
    labels_all: bool = False  # each token of a sample has a label

    @cache  # noqa: B019 (a row of a constant table)
    def classes(self) -> dict[str, str]:
        """Return the class for each type of model."""
        import_transformers()
        from transformers.models.auto import modeling_auto

        return {
            kind: entry if isinstance(entry, str) else entry[0]
            for kind, entry in getattr(modeling_auto, self.mapping).items()
        }


CAUSAL_LM = Objective(
    "causal-lm",
    "causal language model",
    "AutoModelForCausalLM",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    labels_all=True,
)
MASKED_LM = Objective(
    "masked-lm", "masked language model", "AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"
)
SEQ2SEQ = Objective(
    "seq2seq",
    "sequence-to-sequence model",
    "AutoModelForSeq2SeqLM",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    is_padded=True,
)
CLASSIFICATION = Objective(
    "classification",
    "classifier of texts",
    "AutoModelForSequenceClassification",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    is_padded=True,
)
OBJECTIVES = {row.name: row for row in (CAUSAL_LM, MASKED_LM, SEQ2SEQ, CLASSIFICATION)}


def choose_objective(name: str | None, folder: ModelFolder) -> Objective:
    """Return the objective of this name, or that of the folder's architecture if there is no name.

    Raises TaskError if transformers has no such model of the folder's type.
    """
    if name is not None:
        objective = OBJECTIVES[name]
    else:
        fitting = [row for row in OBJECTIVES.values() if folder.architecture in row.classes().values()]
        if not fitting:
            named = f"is {folder.architecture}" if folder.architecture else "is not named"
            raise TaskError(
                f"the architecture of {folder.path} {named}, which has none of the objectives; choose "
                f"one with --set objective=NAME: {', '.join(OBJECTIVES)}"
            )
        objective = fitting[0]
    if folder.kind not in objective.classes():
        raise TaskError(
            f"transformers has no {objective.what} of model_type {folder.kind!r}, that of {folder.path}; "
            "use another model or objective"
        )
    if objective is CAUSAL_LM and _reads_later_tokens(folder):
        raise TaskError(
            f"the model of {folder.path} reads the tokens that {objective.name} predicts: it is an encoder "
            f"of model_type {folder.kind!r}; use --set objective={MASKED_LM.name}, or set "
            f"{_causal_key(folder)} to true in its config.json"
        )
    return objective


def _reads_later_tokens(folder: ModelFolder) -> bool:
    """Return whether each position of the model attends to later positions, as in BERT.

    transformers has such models as causal language models too: a key of their configuration hides the later
    positions.
    """
    if folder.kind not in MASKED_LM.classes() or folder.kind in SEQ2SEQ.classes():
        return False
    return not folder.tree.get(_causal_key(folder), False)


def _causal_key(folder: ModelFolder) -> str:
    return "causal" if folder.kind == "xlm" else "is_decoder"
