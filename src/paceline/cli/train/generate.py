"""paceline generate: texts that the language model of a run writes."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options.checkpoint_options import Checkpoint, Device, Ranks


def generate(
    run: Annotated[Path, typer.Argument(help="Folder of a run of hf:FOLDER")],
    prompt: Annotated[str | None, typer.Argument(help="Text to continue, or source of a target")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Prompts: an object in each line of a .jsonl, with the key of the run's texts, "
            "or else a prompt in each line",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write JSON lines to this file")
    ] = None,
    checkpoint: Checkpoint = "last",
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of new tokens "
            "[default: as generation_config.json of the folder says, or 64, or all that fit]"
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="0: choose the most likely tokens. Above 0: draw them, with the logits divided by it "
            "[default: as generation_config.json of the folder says, or 0]"
        ),
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from the K most likely tokens")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the most likely tokens whose probabilities add up to P")
    ] = None,
    beams: Annotated[int | None, typer.Option(help="Number of beams of beam search")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the draws")] = 0,
    ranks: Ranks = None,
    plan: Annotated[
        str | None,
        typer.Option(
            help="Plan, as for train, without pp and cp "
            "[default: as the run; with another number of ranks, the most similar]"
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="Prompts that a rank completes at a time")] = 1,
    device: Device = None,
) -> None:
    """Write texts with the language model of a run of hf:FOLDER.

    The texts do not depend on the number of ranks. No file of the run changes. Under torchrun, mpirun or
    srun, this process becomes a rank.
    """
    from paceline.cli.options.launching import announce_start
    from paceline.distributed.world import read_world
    from paceline.errors import SpecError
    from paceline.files import check_target, write_whole
    from paceline.launch.generate_run import generate as generate_texts
    from paceline.run import open_run
    from paceline.units import several

    folder, me = open_run(run), read_world()
    if (prompt is None) == (prompts is None):
        raise SpecError('specify either a prompt, as in: paceline generate RUN "PROMPT", or --prompts FILE')
    if out is not None:
        check_target(out)
        announce_start(me)
    elif sys.stderr.isatty():
        announce_start(me, sys.stderr)  # the output is texts alone
    from paceline.hf.generate import format_line, read_prompts

    texts: tuple[str, ...] = (prompt,) if prompt is not None else ()
    if prompts is not None:
        texts = read_prompts(prompts, _read_key(folder.spec))
    result = generate_texts(
        folder,
        texts,
        checkpoint,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        beams=beams,
        seed=seed,
        ranks=ranks,
        plan=plan,
        batch=batch,
        device=device,
    )
    if me.rank:
        return
    for note in result.notes:
        print(note, file=sys.stderr)
    lines = [format_line(vars(text)) for text in result.texts]
    if out is not None:
        write_whole(out, "".join(lines))
        print(
            f"{out}: {several(len(lines), 'text')} of {result.checkpoint}, plan {result.plan} on "
            f"{several(result.ranks, 'rank')}, {result.seconds:.1f} s"
        )
    elif prompts is not None:
        print("".join(lines), end="")
    else:
        print(result.texts[0].text)


def _read_key(spec: Path) -> str:
    """Return the key of the texts in JSON lines of a run."""
    from paceline.spec import load_own

    return str(load_own(spec, {})[0].set.get("text", "text"))
