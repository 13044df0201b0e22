"""A trained policy as one file: an ONNX graph that says in its metadata what it reads and where it comes from.

`export_run` makes the file from a run folder of `train.py`; that takes torch. `load_artifact` takes ONNX Runtime alone.

The graph has the inputs `request` [B, 5], `prefill` [B, P, 13], `decode` [B, D, 10], `cluster` [B, 7] (float32, in
physical units, cut to +-1e9, NaN as 0) and `mask` bool[B, 1 + P D 3] (`envs.kernel.replay.show`), and the
outputs `logits` [B, 1 + P D 3] and `action` int64[B], the valid action with the largest logit. B, P and D are free:
one file serves any pool.

The file is read before ONNX Runtime sees it: it must hold everything itself, use arithmetic only (no loops, no
branches, no operators of third parties) and be unchanged since its export.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.kernel import memory as _memory
from envs.kernel import replay as _replay
from envs.kernel.compile import entry_point
from envs.simulator import empty_observation
from envs.state import Observation

from .policy import PolicyError
from .run_folder import TABLES, check_schema, last_checkpoint, load_weights, read_config

if TYPE_CHECKING:
    from .networks import SetScorer

FORMAT = 1
KEY = "conductor_policy"  # of the metadata, a JSON document
INPUTS = (*TABLES, "mask")
OUTPUTS = ("logits", "action")
MOST_BYTES = 64 << 20
OPERATORS = frozenset(
    """
    Abs Add And ArgMax ArgMin Cast CastLike Clip Concat Constant ConstantOfShape Div Elu Equal Erf Exp Expand Flatten
    Gather GatherElements GatherND Gelu Gemm Greater GreaterOrEqual Identity IsInf IsNaN LayerNormalization LeakyRelu
    Less LessOrEqual Log LogSoftmax MatMul Max Mean Min Mul Neg Not Or Pow Range Reciprocal ReduceL2 ReduceLogSumExp
    ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum Relu Reshape ScatterElements Shape Sigmoid Sign Slice Softmax
    Softplus Softsign Split Sqrt Squeeze Sub Sum Tanh TopK Transpose Unsqueeze Where
    """.split()  # noqa: SIM905
)
KEPT_SHAPES = 4  # shapes of observations for which a session is kept
CHECKED_POOLS = ((1, 1), (2, 3), (8, 8), (40, 7))
CHECKED_OBSERVATIONS = 64  # of each of these


# --- the file, without ONNX Runtime ------------------------------------------------------------------------------

Field = tuple[int, int | memoryview]


def _fields(data: memoryview) -> Iterator[Field]:
    """The fields (number, value) of a protobuf message: a number, or the bytes of what is inside.

    Raises:
        ValueError: these bytes are no such message.
    """
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            if at >= len(data) or shift > 63:
                raise ValueError("it ends within a number")
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        tag = number()
        kind = tag & 7
        if kind == 0:
            yield tag >> 3, number()
            continue
        size = {1: 8, 5: 4}.get(kind)
        if kind == 2:
            size = number()
        if size is None or at + size > len(data):
            raise ValueError("it ends within a field" if size else f"a field is of the unknown kind {kind}")
        yield tag >> 3, data[at : at + size]
        at += size


def _inside(message: memoryview, wanted: int) -> list[memoryview]:
    """The messages or texts in one field."""
    return [value for number, value in _fields(message) if number == wanted and isinstance(value, memoryview)]


def _text(message: memoryview, wanted: int) -> str:
    return "".join(bytes(value).decode() for value in _inside(message, wanted)[-1:])


# Numbers of fields in onnx.proto.
_MODEL_GRAPH, _MODEL_METADATA, _MODEL_FUNCTIONS = 7, 14, 25
_GRAPH_NODE, _GRAPH_INITIALIZER, _GRAPH_SPARSE = 1, 5, 15
_NODE_OPERATOR, _NODE_ATTRIBUTE, _NODE_DOMAIN = 4, 5, 7
_ATTRIBUTE_TENSORS, _ATTRIBUTE_OTHERS = (5, 10), (6, 11, 22, 23)  # graphs and sparse tensors
_TENSOR_EXTERNAL = (13, 14)


def _refusal(graph: memoryview) -> str | None:
    """What a policy has no use for in a graph, or None."""
    tensors = _inside(graph, _GRAPH_INITIALIZER)
    if _inside(graph, _GRAPH_SPARSE):
        return "it has sparse weights"
    for node in _inside(graph, _GRAPH_NODE):
        operator, domain = _text(node, _NODE_OPERATOR), _text(node, _NODE_DOMAIN)
        if domain not in ("", "ai.onnx") or operator not in OPERATORS:
            name = f"{domain}.{operator}" if domain else operator
            return f"it has the operator {name[:80]!r}, and a policy is arithmetic only"
        for attribute in _inside(node, _NODE_ATTRIBUTE):
            if any(number in _ATTRIBUTE_OTHERS for number, _ in _fields(attribute)):
                return f"its operator {operator} has graphs inside"
            for number in _ATTRIBUTE_TENSORS:
                tensors += _inside(attribute, number)
    if any(number in _TENSOR_EXTERNAL and value != 0 for tensor in tensors for number, value in _fields(tensor)):
        return "it refers to weights in another file"
    return None


class _File(NamedTuple):
    data: bytes
    about: dict[str, Any]  # its metadata
    graph: memoryview


def _read(path: Path) -> _File:
    """A file with its metadata, its format checked.

    Raises:
        PolicyError: naming the file and what was expected.
    """
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise PolicyError(f"{path}: {size >> 20} MiB; a policy has at most {MOST_BYTES >> 20}")
        data = path.read_bytes()
    except FileNotFoundError:
        raise PolicyError(f"{path}: no such file") from None
    except OSError as error:
        raise PolicyError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        about, graph = _parse(data)
    except (ValueError, RecursionError) as error:
        raise PolicyError(f"{path}: not an ONNX file, or damaged: {error}") from None
    if graph is None:
        raise PolicyError(f"{path}: not an ONNX file: it has no graph")
    if about is None:
        raise PolicyError(f"{path}: an ONNX file, but no policy: expected one made by `python -m policies export`")
    found = about.get("format")
    if not isinstance(found, int) or found > FORMAT:
        raise PolicyError(
            f"{path}: of format {found!r}, newer than {FORMAT}, which this version reads: upgrade conductor-gym"
        )
    for key, kind in (("name", str), ("recheck", bool), ("network", dict), ("training", dict)):
        if not isinstance(about.get(key), kind):
            raise PolicyError(f"{path}: its metadata must have {key!r} ({kind.__name__}), found {about.get(key)!r}")
    return _File(data, about, graph)


def _parse(data: bytes) -> tuple[dict[str, Any] | None, memoryview | None]:
    """Metadata and graph of an ONNX file, None where there is none. Raises ValueError."""
    whole = memoryview(data)
    graphs = _inside(whole, _MODEL_GRAPH)
    texts = {_text(entry, 1): _text(entry, 2) for entry in _inside(whole, _MODEL_METADATA)}
    about = json.loads(texts[KEY]) if KEY in texts else None
    if about is not None and not isinstance(about, dict):
        raise ValueError(f"its metadata {KEY} is no mapping")
    return about, graphs[-1] if graphs else None


def _digest(graph: memoryview | bytes) -> str:
    return hashlib.sha256(graph).hexdigest()


def read_metadata(path: Path | str) -> dict[str, Any]:
    """What a policy file says of itself; needs neither ONNX Runtime nor the same observation.

    Raises:
        PolicyError: naming the file and what was expected.
    """
    return _read(Path(path)).about


# --- deciding ----------------------------------------------------------------------------------------------------


def load_artifact(path: Path | str) -> OnnxPolicy:
    """The policy in a file made by `export_run`. Needs ONNX Runtime, not torch.

    Raises:
        PolicyError: naming the file and what was expected.
    """
    path = Path(path)
    data, about, graph = _read(path)
    try:
        refusal = "it has functions of its own" if _inside(memoryview(data), _MODEL_FUNCTIONS) else _refusal(graph)
    except ValueError as error:
        raise PolicyError(f"{path}: not an ONNX file, or damaged: {error}") from None
    if refusal:
        raise PolicyError(f"{path}: refused: {refusal}")
    check_schema(path, about.get("observation"))
    if about.get("graph_sha256") != _digest(graph):
        raise PolicyError(f"{path}: its graph is not the one that was exported: damaged, or edited since")
    return OnnxPolicy(data, str(path), about)


class OnnxPolicy:
    """A policy file, loaded: the valid action with the largest logit, from ONNX Runtime on one thread.

    The first decision for a number of clusters and instances takes some 30 ms more: the graph is prepared for these.

    Args:
        data: the ONNX file. name: what errors and tables call it. about: its metadata.

    Raises:
        PolicyError: ONNX Runtime is missing, or refuses the graph.
    """

    bounded = True
    """It always ends, in about the same time: a server need not have a thread for it."""

    def __init__(self, data: bytes, name: str, about: Mapping[str, Any]) -> None:
        self.name = name
        self.about = about
        self.recheck = bool(about["recheck"])
        self._data = data
        self._lock = threading.Lock()  # the buffers are shared
        self._bound: dict[tuple[int, int, int], _Bound] = {}
        self._observed: tuple[Observation | None, Any, Any] = (None, None, None)  # the last one, its header and buffers
        self._fill: Any = None
        self._check()

    def reset(self, clusters: int, seed: int) -> None:
        """Nothing to forget: a decision depends on the observation only."""

    def decide(self, observation: Observation) -> NDArray[np.int64]:
        """Actions int64[C]; any pool size.

        Raises:
            PolicyError: the best logit of a cluster is not finite.
        """
        with self._lock:
            logits = self._logits(observation)
            actions: NDArray[np.int64] = logits.argmax(1)  # the first NaN where there is one
            if len(actions) == 1:
                best = logits[0, actions[0]]
                finite = math.isfinite(best)
            else:
                best = logits[np.arange(len(actions)), actions]
                finite = bool(np.isfinite(best).all())
        if not finite:
            raise PolicyError(f"{self.name}: the logit of the chosen action is not finite (NaN or infinite)")
        return actions

    def logits(self, observation: Observation) -> NDArray[np.float32]:
        """Logits float32[C, 1 + P D 3] in the order of actions; those of invalid ones are -1e8."""
        with self._lock:
            return self._logits(observation).copy()

    def scores(self, observation: Observation) -> NDArray[np.float64]:
        """Probabilities float64[C, 1 + P D 3] of the actions, as the policy was trained: the softmax of the logits.

        Invalid actions have 0. `decide` takes the most probable; these say how sure it is, and what a policy that
        samples would have done, which off-policy evaluation asks for.

        Raises:
            PolicyError: a logit is not finite.
        """
        logits = self.logits(observation).astype(np.float64)
        if not np.isfinite(logits).all():
            raise PolicyError(f"{self.name}: a logit is not finite (NaN or infinite)")
        weights = np.exp(logits - logits.max(1, keepdims=True))
        scores: NDArray[np.float64] = weights / weights.sum(1, keepdims=True)
        return scores

    def _logits(self, observation: Observation) -> NDArray[np.float32]:
        """The logits, in a buffer that the next call overwrites."""
        known, header, bound = self._observed
        if known is not observation:
            clusters, prefills = observation.prefill.shape
            decodes = observation.decode.shape[1]
            for name, features in TABLES.items():
                if getattr(observation, name).dtype != features:
                    raise PolicyError(f"{self.name}: the table {name!r} of the observation is no table of this version")
            # A table that is not in one piece is copied, and cannot be kept: who owns it will change it.
            copied = Observation(*map(np.ascontiguousarray, observation))
            kept = all(ours is theirs for ours, theirs in zip(copied, observation, strict=True))
            header = _memory.headers(_memory.OBSERVATION, copied, clusters, prefills=prefills, decodes=decodes)
            bound = self._bind(clusters, prefills, decodes)
            tables = bound.masks, bound.request, bound.prefill, bound.decode, bound.cluster
            self._fill = entry_point(_replay.features, header, *tables)
            self._observed = (observation if kept else None, header, bound)
        self._fill(header, bound.masks, bound.request, bound.prefill, bound.decode, bound.cluster)
        if math.isnan(np.dot(bound.values, bound.values)):
            np.nan_to_num(bound.values, copy=False, nan=0.0)
        try:
            bound.session.run_with_iobinding(bound.binding)
        except Exception as error:
            raise PolicyError(f"{self.name}: ONNX Runtime failed: {_one_line(error)}") from None
        logits: NDArray[np.float32] = bound.logits
        return logits

    def _bind(self, clusters: int, prefills: int, decodes: int) -> _Bound:
        """Buffers for observations of a shape, and a session that reads and writes them."""
        shape = (clusters, prefills, decodes)
        if shape not in self._bound:
            while len(self._bound) >= KEPT_SHAPES:
                del self._bound[next(iter(self._bound))]
            self._bound[shape] = _Bound(self._session(shape), *shape)
        return self._bound[shape]

    def _session(self, shape: tuple[int, int, int] | None = None) -> Any:
        try:
            import onnxruntime
        except ImportError:
            raise PolicyError(
                f"{self.name}: an ONNX policy needs onnxruntime: pip install 'conductor-gym[serve]'"
            ) from None
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.log_severity_level = 4  # errors are raised
        if shape:
            for name, size in zip(("batch", "prefills", "decodes"), shape, strict=True):
                options.add_free_dimension_override_by_name(name, size)
        try:
            return onnxruntime.InferenceSession(self._data, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise PolicyError(f"{self.name}: ONNX Runtime refuses it: {_one_line(error)}") from None

    def _check(self) -> None:
        """Whether the graph takes and gives what it should, on a small observation."""
        session = self._session()
        found = [put.name for put in session.get_inputs()], [put.name for put in session.get_outputs()]
        if found != (list(INPUTS), list(OUTPUTS)):
            raise PolicyError(
                f"{self.name}: expected the inputs {', '.join(INPUTS)} and the outputs {', '.join(OUTPUTS)}, found "
                f"{', '.join(found[0])} and {', '.join(found[1])}"
            )
        clusters, prefills, decodes = 2, 3, 2
        actions = 1 + prefills * decodes * 3
        shapes = _shapes(clusters, prefills, decodes)
        given: dict[str, Any] = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        given["mask"] = np.ones((clusters, actions), np.bool_)
        try:
            logits, chosen = session.run(None, given)
        except Exception as error:
            raise PolicyError(f"{self.name}: ONNX Runtime failed: {_one_line(error)}") from None
        if logits.shape != (clusters, actions) or logits.dtype != np.float32 or chosen.shape != (clusters,):
            raise PolicyError(
                f"{self.name}: expected logits float32[{clusters}, {actions}] for {clusters} clusters of {prefills} "
                f"prefill and {decodes} decode instances, found {logits.dtype}{list(logits.shape)}"
            )


class _Bound:
    """Where a session reads observations of one shape and writes their logits."""

    def __init__(self, session: Any, clusters: int, prefills: int, decodes: int) -> None:
        shapes = _shapes(clusters, prefills, decodes)
        actions = (clusters, 1 + prefills * decodes * 3)
        self.session = session
        self.values = np.zeros(sum(math.prod(shape) for shape in shapes.values()), np.float32)
        self.masks = np.zeros(actions, np.bool_)
        self.logits = np.zeros(actions, np.float32)
        self.binding = session.io_binding()
        tables, start = [], 0
        for name, shape in shapes.items():
            stop = start + math.prod(shape)
            tables.append(self.values[start:stop].reshape(clusters, -1))
            self.binding.bind_input(name, "cpu", 0, np.float32, shape, tables[-1].ctypes.data)
            start = stop
        self.request, self.prefill, self.decode, self.cluster = tables
        self.binding.bind_input("mask", "cpu", 0, np.bool_, actions, self.masks.ctypes.data)
        self.binding.bind_output("logits", "cpu", 0, np.float32, actions, self.logits.ctypes.data)


def compile_features() -> None:
    """Compile what an `OnnxPolicy` runs, or read it from the cache: for who may not write to that later."""
    observation = empty_observation(1, 1, 1)
    header = _memory.headers(_memory.OBSERVATION, observation, 1, prefills=1, decodes=1)
    tables = [np.zeros((1, math.prod(shape)), np.float32) for shape in _shapes(1, 1, 1).values()]
    entry_point(_replay.features, header, np.zeros((1, 4), np.bool_), *tables)


def _shapes(clusters: int, prefills: int, decodes: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the graph's tables."""
    rows: tuple[tuple[int, ...], ...] = ((), (prefills,), (decodes,), ())
    return {name: (clusters, *n, len(TABLES[name].names or ())) for name, n in zip(TABLES, rows, strict=True)}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


# --- export ------------------------------------------------------------------------------------------------------


def export_run(run: Path | str, out: Path | str, checkpoint: str = "best", *, force: bool = False) -> dict[str, Any]:
    """Write the policy of a run folder to one ONNX file, after checking that it decides the same; returns its metadata.

    Args:
        checkpoint: `best`, `final`, or a file: a path, or a name within the run folder or its checkpoints.
        force: replace `out`.

    Raises:
        PolicyError: no such run or checkpoint, `out` exists or cannot be written, or the file decides otherwise.
    """
    run, out = Path(run), Path(out)
    if not run.is_dir():
        raise PolicyError(f"{run}: no such run folder")
    config = read_config(run)
    if config.get("network") is None:
        raise PolicyError(f"{run}: has no network to export: it is the policy {config['policy']}, by that name")
    weights = _checkpoint(run, checkpoint)
    if not out.resolve().parent.is_dir():
        raise PolicyError(f"{out}: expected a file in a folder that exists")
    if out.is_dir():
        raise PolicyError(f"{out}: is a folder; expected a file")
    if out.exists() and not force:
        raise PolicyError(f"{out}: exists; --force replaces it")
    if out.suffix.lower() != ".onnx":
        raise PolicyError(f"{out}: expected a name that ends in .onnx")
    scorer = load_weights(weights, config["network"])
    about = _metadata(run, weights, config)
    data = to_onnx(scorer, about)
    check_same(scorer, data, about)
    unfinished = out.with_name(out.name + ".unfinished")
    try:
        unfinished.write_bytes(data)
        unfinished.replace(out)
    except OSError as error:
        raise PolicyError(f"{out}: cannot be written: {error.strerror or error}") from None
    return _read(out).about


def _checkpoint(run: Path, name: str) -> Path:
    if name == "best" and not (run / "best.zip").is_file():
        last = last_checkpoint(run)
        if last is None:
            raise PolicyError(f"{run} has neither best.zip nor a checkpoint: the training saved nothing")
        print(f"{run}: no best.zip, taking the last checkpoint {last.name}", file=sys.stderr)
        return last
    if name in ("best", "final"):
        candidates = [run / f"{name}.zip"]
    else:
        candidates = [Path(name), run / name, run / "checkpoints" / name]
    for file in candidates:
        if file.is_file():
            return file
    have = sorted(file.name for folder in (run, run / "checkpoints") for file in folder.glob("*.zip"))
    raise PolicyError(f"{run}: no checkpoint {name!r}; there are {', '.join(have) or 'none'}")


def _flag(name: str, value: Any) -> str:
    """An option of `train.py` as on its command line."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {value}"


def _metadata(run: Path, weights: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """All that is said of a policy but the digest of its graph. No times: the same run gives the same bytes."""
    from . import networks

    metrics: dict[str, Any] = {}
    try:
        read = json.loads((run / "metrics.json").read_text())
        metrics = read if isinstance(read, dict) else {}
    except (OSError, ValueError):
        print(f"{run}: no metrics.json that can be read: the file will not say how it was validated", file=sys.stderr)
    options = config.get("options") or {}
    if weights.name == "best.zip":
        steps = (metrics.get("best") or {}).get("steps")
    elif weights.name == "final.zip":
        steps = metrics.get("steps")
    else:
        digits = weights.stem.removeprefix("steps_")
        steps = int(digits) if digits.isdigit() else None
    validated = [entry for entry in metrics.get("validation") or () if entry.get("steps") == steps]
    command = ["python train.py", *(_flag(name, value) for name, value in options.items() if value != "")]
    return {
        "format": FORMAT,
        "name": run.resolve().name,
        "network": config["network"],
        "recheck": bool(config.get("recheck", True)),
        "observation": config["observation"],
        "actions": "0 rejects, else 1 + (prefill * decode_instances + decode) * 3 + source; "
        "sources: 0 local, 1 fetch, 2 recompute",
        "normalisation": {
            "before the graph": f"float32, cut to +-{_replay.LARGEST:g}, NaN as 0",
            "in the graph": "column / divisor, then sign(x) log(1 + |x|), cut to +-largest",
            "largest": networks.LARGEST_SCALED,
            "least": networks.LEAST,
            "context": networks.OF_CONTEXT,
            "counted per instance": networks.PER_INSTANCE,
            "prefill": networks.OF_PREFILL,
            "decode": networks.OF_DECODE,
            "capacity": "free_tokens + kv_tokens + pending_tokens "
            "+ (batch + pending_requests) * expected_output_tokens",
        },
        "training": {
            "command": " ".join(command),
            "seed": options.get("seed"),
            "checkpoint": weights.name,
            "steps": steps,
            "validation": validated[-1] if validated else None,
            "trained_on": config.get("trained_on"),
        },
        "versions": {
            "training": config.get("versions"),
            "export": {name: _version(name) for name in ("conductor-gym", "torch", "onnx", "onnxscript", "numpy")},
        },
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def to_onnx(scorer: SetScorer, about: Mapping[str, Any]) -> bytes:
    """An ONNX file of a scorer with its metadata; the same scorer and metadata give the same bytes.

    Raises:
        PolicyError: packages are missing.
    """
    try:
        import onnx
        import onnxscript  # noqa: F401  the exporter needs it
        import torch
    except ImportError as error:
        raise PolicyError(f"an export needs {error.name}: pip install 'conductor-gym[train,export]'") from None
    from .networks import Decider

    sizes = {name: torch.export.Dim(name) for name in ("batch", "prefills", "decodes")}
    batch, prefills, decodes = sizes.values()
    b, p, d = 2, 3, 4  # of the example; none may be 1, which would be taken for a constant
    example = [torch.zeros(shape) for shape in _shapes(b, p, d).values()]
    masks = torch.ones(b, 1 + p * d * 3, dtype=torch.bool)
    shapes = ({0: batch}, {0: batch, 1: prefills}, {0: batch, 1: decodes}, {0: batch})
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                Decider(scorer).eval(),
                (*example, masks),
                dynamo=True,
                verbose=False,
                input_names=INPUTS,
                output_names=OUTPUTS,
                dynamic_shapes=(*shapes, {0: batch, 1: torch.export.Dim.DYNAMIC}),
            )
    finally:
        log.setLevel(level)
    assert program is not None
    model = program.model_proto
    _strip(model)
    about = {**about, "graph_sha256": _digest(model.graph.SerializeToString(deterministic=True))}
    onnx.helper.set_model_props(model, {KEY: json.dumps(about)})
    data: bytes = model.SerializeToString(deterministic=True)
    return data


def _strip(model: Any) -> None:
    """Take away what the exporter tells of this machine and of the source code."""
    del model.metadata_props[:]
    model.doc_string = ""
    graph = model.graph
    graph.doc_string = ""
    del graph.metadata_props[:], graph.value_info[:]
    graph.name = "policy"
    for part in (*graph.node, *graph.initializer, *graph.input, *graph.output):
        part.doc_string = ""
        del part.metadata_props[:]


def check_same(scorer: SetScorer, data: bytes, about: Mapping[str, Any]) -> None:
    """Whether an ONNX file decides as its scorer does, on random observations of several pools.

    Raises:
        PolicyError: it does not; naming the pool.
    """
    import torch

    from .run_folder import action_masks, float32_tables

    policy = OnnxPolicy(data, about["name"], about)
    rng = np.random.default_rng(0)
    for prefills, decodes in CHECKED_POOLS:
        observation = _random_observation(rng, CHECKED_OBSERVATIONS, prefills, decodes)
        found, actions = policy.logits(observation), policy.decide(observation)
        with torch.inference_mode():
            tables = {name: torch.from_numpy(table) for name, table in float32_tables(observation).items()}
            expected = scorer(tables, torch.from_numpy(action_masks(observation))).numpy()
        worst = np.abs(found - expected) - 1e-4 * np.abs(expected)
        chosen = expected[np.arange(len(actions)), actions]
        if not (worst.max() <= 1e-3 and (chosen >= expected.max(1) - 1e-3).all()):
            raise PolicyError(
                f"{about['name']}: ONNX Runtime and torch disagree on observations of {prefills} prefill and {decodes} "
                f"decode instances, by {np.nanmax(worst):g} in a logit: nothing written"
            )


def _random_observation(rng: np.random.Generator, clusters: int, prefills: int, decodes: int) -> Observation:
    """Random features of sizes that occur, some NaN; some instances down, in one observation all."""
    observation = empty_observation(clusters, prefills, decodes)
    for name in TABLES:
        table = getattr(observation, name)
        for column in table.dtype.names:
            size = 1e5 if "tokens" in column else 10.0 if column in ("batch", "in_flight") else 1.0
            table[column] = size * rng.exponential(size=table.shape)
    observation.request["input_tokens"] += 1.0
    observation.request["ttft_slo_s"] += 0.1
    observation.request["tbt_slo_s"] += 0.01
    observation.prefill["fetch_s"][1] = np.nan
    observation.prefill_mask[:] = rng.random(observation.prefill_mask.shape) < 0.8
    observation.decode_mask[:] = rng.random(observation.decode_mask.shape) < 0.8
    observation.decode_mask[0] = 0
    return observation
