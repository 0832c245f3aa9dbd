"""The files of BigEarthNet: v1 are GeoTIFF and JSON, v2 (reBEN) is LMDB of safetensors, and Parquet."""

import io
import json
import os
from collections.abc import Collection, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.data import transforms
from paceline.errors import DataError, TaskError

# The nomenclature of 19 classes and the classes of CORINE Land Cover, level 3, in each (Sumbul et al.,
# BigEarthNet-MM, 2021, table 2). Eleven classes of CORINE are in none of them.
CLASSES: dict[str, tuple[str, ...]] = {
    "Urban fabric": ("Continuous urban fabric", "Discontinuous urban fabric"),
    "Industrial or commercial units": ("Industrial or commercial units",),
    "Arable land": ("Non-irrigated arable land", "Permanently irrigated land", "Rice fields"),
    "Permanent crops": (
        "Vineyards",
        "Fruit trees and berry plantations",
        "Olive groves",
        "Annual crops associated with permanent crops",
    ),
    "Pastures": ("Pastures",),
    "Complex cultivation patterns": ("Complex cultivation patterns",),
    "Land principally occupied by agriculture, with significant areas of natural vegetation": (
        "Land principally occupied by agriculture, with significant areas of natural vegetation",
    ),
    "Agro-forestry areas": ("Agro-forestry areas",),
    "Broad-leaved forest": ("Broad-leaved forest",),
    "Coniferous forest": ("Coniferous forest",),
    "Mixed forest": ("Mixed forest",),
    "Natural grassland and sparsely vegetated areas": ("Natural grassland", "Sparsely vegetated areas"),
    "Moors, heathland and sclerophyllous vegetation": ("Moors and heathland", "Sclerophyllous vegetation"),
    "Transitional woodland, shrub": ("Transitional woodland/shrub",),
    "Beaches, dunes, sands": ("Beaches, dunes, sands",),
    "Inland wetlands": ("Inland marshes", "Peatbogs"),
    "Coastal wetlands": ("Salt marshes", "Salines"),
    "Inland waters": ("Water courses", "Water bodies"),
    "Marine waters": ("Coastal lagoons", "Estuaries", "Sea and ocean"),
}
WITHOUT_CLASS = {
    *("Road and rail networks and associated land", "Port areas", "Airports", "Mineral extraction sites"),
    *("Dump sites", "Construction sites", "Green urban areas", "Sport and leisure facilities"),
    *("Bare rock", "Burnt areas", "Intertidal flats"),
}
# The 43 classes of v1, in the order of their codes in CORINE Land Cover, from 111 to 523
CLASSES_43 = (
    *("Continuous urban fabric", "Discontinuous urban fabric", "Industrial or commercial units"),
    *("Road and rail networks and associated land", "Port areas", "Airports", "Mineral extraction sites"),
    *("Dump sites", "Construction sites", "Green urban areas", "Sport and leisure facilities"),
    *("Non-irrigated arable land", "Permanently irrigated land", "Rice fields", "Vineyards"),
    *("Fruit trees and berry plantations", "Olive groves", "Pastures"),
    *("Annual crops associated with permanent crops", "Complex cultivation patterns"),
    "Land principally occupied by agriculture, with significant areas of natural vegetation",
    *("Agro-forestry areas", "Broad-leaved forest", "Coniferous forest", "Mixed forest"),
    *("Natural grassland", "Moors and heathland", "Sclerophyllous vegetation"),
    *("Transitional woodland/shrub", "Beaches, dunes, sands", "Bare rock", "Sparsely vegetated areas"),
    *("Burnt areas", "Inland marshes", "Peatbogs", "Salt marshes", "Salines", "Intertidal flats"),
    *("Water courses", "Water bodies", "Coastal lagoons", "Estuaries", "Sea and ocean"),
)
NUMBERS = {name: number for number, name in enumerate(CLASSES)}
NUMBERS_V1 = {name: number for number, names in enumerate(CLASSES.values()) for name in names}
SPLITS_V1 = {"train": "train.csv", "validation": "val.csv", "test": "test.csv"}
LABELS_V1 = "_labels_metadata.json"


class Patches(Protocol):
    """Patches of a split by index."""

    def __len__(self) -> int: ...

    def read_bands(self, index: int, bands: Sequence[str]) -> list[Tensor]:
        """Return the bands of a patch, each in its own resolution. Raises DataError."""

    def read_labels(self, index: int) -> list[int]:
        """Return the numbers of the classes of a patch. Raises DataError."""


class PatchesV1:
    """BigEarthNet-S2 v1: FOLDER/PATCH/PATCH_B02.tif …, PATCH_labels_metadata.json, and lists of patches.

    The lists are train.csv, val.csv and test.csv in FOLDER, with the name of a patch as the first value of
    each line, as published with the data. It requires Pillow. Raises DataError.

    classes: 19, or the 43 of the files.
    """

    def __init__(self, folder: Path, split: str, classes: int):
        import_module("PIL")  # missing here, and not in a worker
        self.folder, path = folder, folder / SPLITS_V1[split]
        is_43 = classes == len(CLASSES_43)
        self._numbers = {name: at for at, name in enumerate(CLASSES_43)} if is_43 else NUMBERS_V1
        self._ignored: Collection[str] = () if is_43 else WITHOUT_CLASS
        try:
            lines = path.read_text().splitlines()
        except OSError as error:
            raise DataError(
                f"cannot read {path}: {error.strerror}; put the published lists train.csv, val.csv and"
                " test.csv there"
            ) from error
        names = [line.split(",")[0].strip() for line in lines]
        self.names = [name for name in names if name]
        if bad := [name for name in self.names if Path(name).name != name]:
            raise DataError(f"{path} has {bad[0]!r}, which is no name of a patch")

    def __len__(self) -> int:
        return len(self.names)

    def read_bands(self, index: int, bands: Sequence[str]) -> list[Tensor]:
        from PIL import Image

        name, tensors = self.names[index], []
        for band in bands:
            path = self.folder / name / f"{name}_{band}.tif"
            try:
                with Image.open(io.BytesIO(path.read_bytes())) as image:
                    tensors.append(torch.from_numpy(np.array(image).astype(np.int32)))
            except OSError as error:
                raise DataError(f"cannot read {path}: {error.strerror or error}") from error
            except Exception as error:  # Pillow's decoders raise many kinds
                raise DataError(f"{path} is not a GeoTIFF, or is damaged: {error}") from error
        return tensors

    def read_labels(self, index: int) -> list[int]:
        name = self.names[index]
        path = self.folder / name / f"{name}{LABELS_V1}"
        try:
            labels = [str(label) for label in json.loads(path.read_bytes())["labels"]]
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} has no labels of BigEarthNet: {error!r}") from error
        known = [label for label in labels if label not in self._ignored]
        if unknown := [label for label in known if label not in self._numbers]:
            raise DataError(f"{path} has the label {unknown[0]!r}; expected one of CORINE Land Cover")
        return [self._numbers[label] for label in known]


_databases: dict[Path, Any] = {}  # open in this process; lmdb refuses to open a database twice


def _open_database(path: Path) -> Any:
    import lmdb

    if path not in _databases:
        try:
            # Without locks, because the folder may be read-only; nobody writes while a training reads.
            _databases[path] = lmdb.open(str(path), readonly=True, lock=False, readahead=False)
        except lmdb.Error as error:
            raise DataError(f"{path} is not an LMDB database: {error}") from error
    return _databases[path]


def _close_databases() -> None:
    for database in _databases.values():
        database.close()
    _databases.clear()


# A database must not be used after a fork, and a worker could not open it again.
os.register_at_fork(before=_close_databases)


class PatchesV2:
    """reBEN: FOLDER/metadata.parquet with the split and the labels of each patch, and FOLDER/*.lmdb.

    The database has a safetensors file for each patch, with a tensor for each band, as rico-hdl writes it. It
    requires lmdb and pyarrow. Raises DataError.
    """

    def __init__(self, folder: Path, split: str):
        import_module("lmdb")
        import pyarrow
        from pyarrow import compute, parquet

        path = folder / "metadata.parquet"
        try:
            table = parquet.read_table(path, columns=["patch_id", "labels", "split"])
        except (OSError, pyarrow.ArrowException) as error:
            raise DataError(f"cannot read patch_id, labels and split of {path}: {error}") from error
        chosen = table.filter(compute.equal(table["split"], split))
        self.names, self.labels = chosen["patch_id"].combine_chunks(), chosen["labels"].combine_chunks()
        databases = sorted(folder.glob("*.lmdb"))
        if len(databases) != 1:
            raise DataError(f"{folder} has {len(databases)} databases *.lmdb; expected one, of Sentinel-2")
        self.path = databases[0].resolve()

    def __len__(self) -> int:
        return len(self.names)

    def _read(self, name: str) -> bytes | None:
        with _open_database(self.path).begin() as transaction:
            content: bytes | None = transaction.get(name.encode())
        return content

    def read_bands(self, index: int, bands: Sequence[str]) -> list[Tensor]:
        from safetensors.torch import load

        name = self.names[index].as_py()
        content = self._read(name)
        if content is None:
            raise DataError(f"{self.path} has no patch {name}, which metadata.parquet lists")
        try:
            tensors = load(content)
        except Exception as error:  # safetensors raises its own class
            raise DataError(f"the patch {name} of {self.path} is damaged: {error}") from error
        if missing := [band for band in bands if band not in tensors]:
            raise DataError(
                f"the patch {name} of {self.path} has no band {missing[0]}, only {', '.join(sorted(tensors))}"
            )
        return [tensors[band].to(torch.int32) for band in bands]

    def read_labels(self, index: int) -> list[int]:
        labels = self.labels[index].as_py()
        if unknown := [label for label in labels if label not in NUMBERS]:
            raise DataError(
                f"metadata.parquet has the label {unknown[0]!r} for {self.names[index].as_py()}; expected one"
                " of the 19 classes"
            )
        return [NUMBERS[label] for label in labels]


class BigEarthNetImages:
    """Pairs of an image and its labels.

    The image has the shape (bands, size, size) with the values of the files as float32. A band of another
    resolution, which is read and not assumed, is resized bilinearly. The labels are 1.0 for each class of the
    patch, of shape (classes,).
    """

    def __init__(self, patches: Patches, bands: Sequence[str], size: int, classes: int):
        self.patches, self.bands, self.size, self.classes = patches, bands, size, classes

    def __len__(self) -> int:
        return len(self.patches)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tensors = self.patches.read_bands(index, self.bands)
        for band, tensor in zip(self.bands, tensors, strict=True):
            if tensor.dim() != 2 or not tensor.numel():
                raise DataError(
                    f"band {band} of patch {index} must be an image, got shape {tuple(tensor.shape)}"
                )
        size = (self.size, self.size)
        image = torch.cat([transforms.resize(tensor[None, None].float(), size)[0] for tensor in tensors])
        labels = torch.zeros(self.classes)
        labels[self.patches.read_labels(index)] = 1.0
        return image, labels


def open_patches(folder: Path, split: str, classes: int) -> Patches | None:
    """Return the patches of a split, or None if there is no such split. Raises DataError and TaskError.

    classes: 19 or 43.
    """
    if split not in SPLITS_V1:
        return None
    if not folder.is_dir():
        raise DataError(f"no such folder: {folder}; specify the folder of BigEarthNet: --set folder=PATH")
    has_v2 = (folder / "metadata.parquet").exists()
    if has_v2 and classes != len(CLASSES):
        raise TaskError(f"{folder} has BigEarthNet v2, whose labels are 19 classes; use --set labels=19")
    try:
        return PatchesV2(folder, split) if has_v2 else PatchesV1(folder, split, classes)
    except ImportError as error:
        raise TaskError(f"BigEarthNet requires {error.name}: pip install 'paceline[bigearthnet]'") from error
