"""Find a dataset by the name that a command line gives it: a file, a folder or a hub id."""

from pathlib import Path

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError

from hf_megapack.errors import DataError

# What `save_to_disk` writes into a folder of one dataset, and of several splits.
_SAVED = ("state.json", "dataset_dict.json")
_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def read_dataset(name: str, split: str = "train") -> Dataset:
    """Load rows.

    Args:
        name: A .json, .jsonl or .parquet file, a folder that `save_to_disk` wrote or a hub dataset is, or a hub id.
        split: Which split of a hub dataset, or of a folder that holds several.

    Returns:
        The rows.

    Raises:
        DataError: If there is nothing of that name, or it cannot be read.
    """
    path = Path(name)
    is_file = path.suffix in _BUILDERS
    if is_file and not path.is_file():
        raise DataError(f"there is no file {name}")
    if is_file and not path.stat().st_size:
        raise DataError(f"{name} is empty")
    if path.is_file() and not is_file:
        raise DataError(f"{name} is a file of an unknown kind; known are {', '.join(_BUILDERS)}")
    try:
        if is_file:
            return load_dataset(_BUILDERS[path.suffix], data_files=name, split="train")
        is_saved = any((path / file).exists() for file in _SAVED)
        loaded = load_from_disk(name) if is_saved else load_dataset(name, split=split)
    except (OSError, ValueError, DatasetsError) as error:
        what = "file" if is_file else "folder of a dataset" if path.is_dir() else "file, folder or hub dataset"
        raise DataError(f"{name} cannot be read as a {what}: {error.__cause__ or error}") from error
    if not isinstance(loaded, DatasetDict):
        return loaded
    if split not in loaded:
        raise DataError(f"{name} has no split {split!r}; it has {', '.join(loaded)}")
    return loaded[split]
