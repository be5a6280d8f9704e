"""Read safetensors checkpoints of one or many files straight into the parameters of this rank.

Only the slices that this rank holds are read; the Hugging Face model is never built. A weight that is missing, or one
that no rule reads, is an error: either would train a different model than the one named.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hf_megapack.errors import BackendError, ConfigError
from hf_megapack.weights.names import HeadLayout, Part, WeightRule

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# Buffers that older checkpoints carry and that every model computes for itself.
COMPUTED_SUFFIXES = ("rotary_emb.inv_freq",)
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_ROWS_PER_READ = 4096
# safetensors' names of the types that a weight may have.
_FLOATING = ("F64", "F32", "F16", "BF16")


def checkpoint_folder(model: str) -> Path:
    """Return the local folder that holds a model's safetensors, downloading them from the hub if need be.

    Args:
        model: Local folder or hub id.

    Raises:
        ConfigError: If there are no safetensors there.
    """
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(model, allow_patterns=["model*.safetensors", INDEX_FILE]))
    if not (folder / INDEX_FILE).exists() and not (folder / SINGLE_FILE).exists():
        found = sorted(path.name for path in folder.iterdir())[:20]
        raise ConfigError(
            f"{model} holds neither {SINGLE_FILE} nor {INDEX_FILE} (found: {', '.join(found) or 'nothing'}). Weights "
            "are read from safetensors only: load the model with transformers and save it again with save_pretrained."
        )
    return folder


class CheckpointReader:
    """Slices of named tensors from the safetensors of one folder; use it through `open_checkpoint`."""

    def __init__(self, folder: Path, stack: ExitStack):
        index, files = folder / INDEX_FILE, {SINGLE_FILE}
        # Where both are, the single file is the model, as for transformers: the index may be left over.
        if not (folder / SINGLE_FILE).exists():
            try:
                files = set(json.loads(index.read_text())["weight_map"].values())
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError(f"{index} is no index of a checkpoint: {error!r}. Fetch it again.") from error
        missing = sorted(name for name in files if not (folder / name).exists())
        if missing:
            raise ConfigError(f"{folder} lacks {', '.join(missing)}, which its {INDEX_FILE} names. Fetch it again.")
        handles = [stack.enter_context(_open_file(folder / name)) for name in sorted(files)]
        self._handle_of = {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118 (a handle is no mapping)
        self.folder = folder
        # A checkpoint of the bare decoder (AutoModel) has the same names without their first part.
        self._is_bare = not any(name.startswith("model.") for name in self._handle_of)

    def _stored_name(self, name: str) -> str:
        return name.removeprefix("model.") if self._is_bare else name

    def __contains__(self, name: str) -> bool:
        return self._stored_name(name) in self._handle_of

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's full shape.

        Args:
            name: Hugging Face name.

        Raises:
            BackendError: If the checkpoint lacks it.
        """
        stored = self._stored_name(name)
        if stored not in self._handle_of:
            raise BackendError(
                f"{self.folder} lacks the weight {name}. It is not a complete checkpoint of the model that its "
                "config.json describes."
            )
        return tuple(self._handle_of[stored].get_slice(stored).get_shape())

    def read(self, name: str, dim: int | None = None, part: int = 0, num_parts: int = 1) -> torch.Tensor:
        """Return part `part` of `num_parts` equal parts of a tensor along `dim`, or all of it when `dim` is None.

        Args:
            name: Hugging Face name.
            dim: Dimension to cut, 0 or 1.
            part: Which part.
            num_parts: Number of parts.

        Raises:
            BackendError: If the checkpoint lacks it or its size does not divide.
        """
        shape = self.shape(name)
        stored = self._stored_name(name)
        tensor = self._handle_of[stored].get_slice(stored)
        if dim is None:
            return tensor[...]
        if shape[dim] % num_parts:
            raise BackendError(f"{name} has {shape[dim]} entries along dimension {dim}, not a multiple of {num_parts}.")
        size = shape[dim] // num_parts
        window = slice(part * size, (part + 1) * size)
        return tensor[window] if dim == 0 else tensor[:, window]

    def are_equal(self, name: str, other: str) -> bool:
        """Return whether two matrices hold the same numbers, reading both a few rows at a time.

        Args:
            name: Hugging Face name.
            other: Another.

        Raises:
            BackendError: If the checkpoint lacks one.
        """
        shape = self.shape(name)
        if shape != self.shape(other):
            return False
        one, two = (self._handle_of[stored].get_slice(stored) for stored in map(self._stored_name, (name, other)))
        return all(
            torch.equal(one[first : first + _ROWS_PER_READ].float(), two[first : first + _ROWS_PER_READ].float())
            for first in range(0, shape[0], _ROWS_PER_READ)
        )

    def unread(self, rules: Iterable[WeightRule]) -> list[str]:
        """Return the stored names that no rule reads; computed buffers and tensors without an element are left out."""
        read = {self._stored_name(source) for rule in rules for source in rule.stored_names()}
        names = [n for n in self._handle_of if n not in read and not n.endswith(COMPUTED_SUFFIXES)]
        # Glm4Moe with n_shared_experts=0 has some, of an expert without a width.
        return sorted(n for n in names if 0 not in self._handle_of[n].get_slice(n).get_shape())

    def quantised(self, rules: Iterable[WeightRule]) -> dict[str, str]:
        """Return the stored names of weights that a rule reads and that are no floats of 16 bits or more.

        Args:
            rules: Every rule of the whole model.

        Returns:
            Name to the type's name in safetensors.
        """
        stored = {self._stored_name(source) for rule in rules for source in rule.stored_names()}
        types = {n: self._handle_of[n].get_slice(n).get_dtype() for n in sorted(stored & self._handle_of.keys())}
        return {name: kind for name, kind in types.items() if kind not in _FLOATING}


def _open_file(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read as safetensors: {error}. Fetch it again.") from error


@contextmanager
def open_checkpoint(folder: Path) -> Iterator[CheckpointReader]:
    """Open every safetensors file of a folder for reading slices.

    Args:
        folder: Folder with one file, or with several and their index.

    Raises:
        ConfigError: If the index names a file that is not there, or a file is broken.
    """
    with ExitStack() as stack:
        yield CheckpointReader(folder, stack)


def fuse_qkv(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Interleave query, key and value rows by query group, as Megatron-Core's linear_qkv holds them.

    Args:
        query: Rows of whole query groups. Shape (num_groups * heads_per_group * head_dim, ...).
        key: Shape (num_groups * head_dim, ...).
        value: Shape (num_groups * head_dim, ...).
        head_dim: Size of one head.

    Returns:
        Shape (num_groups * (heads_per_group + 2) * head_dim, ...): for each group its query heads, its key, its value.

    Example:
        >>> rows = [torch.tensor(r) for r in ([0, 1, 2, 3], [10, 11], [20, 21])]
        >>> fuse_qkv(*rows, head_dim=1).tolist()
        [0, 1, 10, 20, 2, 3, 11, 21]
    """
    num_groups = key.shape[0] // head_dim
    parts = [tensor.unflatten(0, (num_groups, -1)) for tensor in (query, key, value)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def read_parameter(
    reader: "CheckpointReader | _RandomSource", rule: WeightRule, heads: HeadLayout, part: Part
) -> torch.Tensor:
    """Read what one rank holds of one Megatron-Core parameter.

    Args:
        reader: The open checkpoint.
        rule: Which parameter.
        heads: Sizes of the whole model's attention.
        part: What the rank holds.

    Returns:
        The local shard, in the checkpoint's dtype.

    Raises:
        BackendError: If a source is missing or does not divide over the ranks.
    """
    rank, size = part.of(rule)
    if rule.role == "experts":
        return _read_experts(reader, rule, rank, size)
    names = rule.sources
    if rule.alternatives and names[0] not in reader:
        names = [name for name in rule.alternatives if name in reader][:1] or names
    shards = [reader.read(name, rule.shard_dim, rank, size) for name in names]
    if rule.fusion == "grouped_qkv":
        return fuse_qkv(*shards, head_dim=heads.head_dim)
    return torch.cat(shards) if rule.fusion == "stacked" else shards[0]


def _read_experts(reader: "CheckpointReader | _RandomSource", rule: WeightRule, rank: int, size: int) -> torch.Tensor:
    """Read this rank's experts, from one tensor for all or from those of each expert."""
    tensors = rule.experts
    if tensors.fused in reader:
        return reader.read(tensors.fused, 0, rank, size)
    count = tensors.num_experts // size
    local = range(rank * count, (rank + 1) * count)
    return torch.stack([torch.cat([reader.read(name.format(e)) for name in tensors.each]) for e in local])


def load_parameters(
    folder: Path,
    rules: Iterable[WeightRule],
    parameters: Mapping[str, torch.Tensor],
    heads: HeadLayout,
    *,
    ignored: Callable[[str], bool] = lambda name: False,
    part: Part = Part(),  # noqa: B008 (frozen)
) -> None:
    """Copy a checkpoint into the parameters that this rank holds, one tensor at a time.

    Args:
        folder: Folder with safetensors.
        rules: Every rule of the whole model.
        parameters: The local parameters under the names that the rules use; layers of other ranks are absent.
        heads: Sizes of the whole model's attention.
        ignored: Whether a Hugging Face name may be present without being read (a stored copy of a tied head).
        part: What this rank holds.

    Raises:
        BackendError: If a weight is missing, has another shape, or a parameter has no rule.
        ConfigError: If the checkpoint holds weights that the model does not have, one under two names or quantised, or
            a head of its own where the model's is tied.
    """
    rules = list(rules)
    unclaimed = sorted(set(parameters) - {rule.parameter for rule in rules})
    if unclaimed:
        raise BackendError(f"No weight rule fills {', '.join(unclaimed[:5])} ({len(unclaimed)} parameters).")
    with open_checkpoint(folder) as reader, torch.no_grad():
        extra = [name for name in reader.unread(rules) if not ignored(name)]
        if extra:
            raise ConfigError(
                f"{folder} holds {len(extra)} weights that the model of its config.json does not have, the first "
                f"{', '.join(extra[:3])}. Quantised checkpoints and other architectures cannot be trained."
            )
        if quantised := reader.quantised(rules):
            name, kind = next(iter(quantised.items()))
            raise ConfigError(
                f"{folder} holds {len(quantised)} quantised weights, the first {name} as {kind}; what scales they have "
                "is nowhere said. Take the checkpoint in bfloat16, float16 or float32."
            )
        for rule in rules:
            _check_has_one_name(reader, rule)
        read = {source for rule in rules for source in rule.sources}
        is_tied_copy = _HEAD in reader and _HEAD not in read and _EMBEDDING in read
        # transformers ties the two only where they are equal.
        if is_tied_copy and not reader.are_equal(_HEAD, _EMBEDDING):
            raise ConfigError(
                f"{folder} holds a {_HEAD} that differs from {_EMBEDDING}, but tie_word_embeddings=True in its "
                "config.json. transformers would use both: set tie_word_embeddings to false there to train that model."
            )
        for rule in rules:
            if rule.parameter not in parameters:
                continue
            parameter = parameters[rule.parameter]
            value = read_parameter(reader, rule, heads, part)
            if value.shape != parameter.shape:
                raise BackendError(
                    f"{' + '.join(rule.sources)} has shape {tuple(value.shape)}; the model needs "
                    f"{tuple(parameter.shape)}. config.json and the weights do not belong together."
                )
            parameter.copy_(value)


def _check_has_one_name(reader: CheckpointReader, rule: WeightRule) -> None:
    """Refuse a weight that is there under two names: which one is meant is nowhere said."""
    if rule.experts is not None:
        ways = [[rule.experts.fused], rule.experts.names()]
    else:
        ways = [list(rule.sources), *([name] for name in rule.alternatives)]
    found = [next((name for name in names if name in reader), None) for names in ways]
    doubled = [name for name in found if name is not None]
    if len(doubled) > 1:
        raise ConfigError(
            f"{reader.folder} holds the same weight as {' and as '.join(doubled)}. Keep one of the two, or fetch the "
            "checkpoint again."
        )


class _RandomSource:
    """Stands in for a `CheckpointReader`: every tensor is drawn whole from a stream of its own, then cut.

    A stream runs on the device of the parameter, so no host draws what a GPU will hold; a GPU draws other numbers than
    a CPU would. Experts have a stream each.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], std: float, seed: int, device: torch.device):
        self._shapes = shapes
        self._std, self._seed, self._device = std, seed, device

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def read(self, name: str, dim: int | None = None, part: int = 0, num_parts: int = 1) -> torch.Tensor:
        """Return part `part` of `num_parts` of a random tensor, as `CheckpointReader.read` does of a stored one."""
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(f"{self._seed}/{name}".encode()))
        full = torch.empty(self._shapes[name], device=self._device).normal_(0.0, self._std, generator=generator)
        return full if dim is None else full.chunk(num_parts, dim)[part]


def _source_shapes(rule: WeightRule, local: torch.Size, heads: HeadLayout, size: int) -> dict[str, tuple[int, ...]]:
    """Return the full shapes of the Hugging Face tensors that make up a parameter of which this is the local shape."""
    if rule.role == "experts":
        rows = local[1] // len(rule.sources)
        return dict.fromkeys(rule.experts.names(), (rows, local[2]))
    full = [n * size if dim == rule.shard_dim else n for dim, n in enumerate(local)]
    if rule.fusion == "grouped_qkv":
        rows = [count * heads.head_dim for count in (heads.num_heads, heads.num_groups, heads.num_groups)]
    else:
        rows = [full[0] // len(rule.sources)] * len(rule.sources)
    return {source: (count, *full[1:]) for source, count in zip(rule.sources, rows, strict=True)}


def draw_parameters(
    rules: Iterable[WeightRule],
    parameters: Mapping[str, torch.Tensor],
    heads: HeadLayout,
    *,
    std: float,
    seed: int,
    part: Part = Part(),  # noqa: B008 (frozen)
) -> None:
    """Fill the parameters that this rank holds at random, with the same whole model in every layout.

    Args:
        rules: Every rule of the whole model.
        parameters: The local parameters under the names that the rules use; layers of other ranks are absent.
        heads: Sizes of the whole model's attention.
        std: Standard deviation of matrices; norms become one, biases zero.
        seed: Seed of the draws.
        part: What this rank holds.
    """
    for rule in rules:
        parameter = parameters.get(rule.parameter)
        if parameter is None:
            continue
        with torch.no_grad():
            if parameter.dim() == 1:
                parameter.fill_(1.0 if rule.role == "norm" else 0.0)
            else:
                shapes = _source_shapes(rule, parameter.shape, heads, part.of(rule)[1])
                source = _RandomSource(shapes, std, seed, parameter.device)
                parameter.copy_(read_parameter(source, rule, heads, part))
