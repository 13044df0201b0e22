"""The run folder: all that is needed to evaluate, serve or go on with a trained policy.

    runs/<id>/
        config.yaml      options, observation schema, network, what it was trained on
        metrics.json     validation history, best, steps and seconds
        tensorboard/     scalars
        checkpoints/     steps_000000016384.zip, ...
        best.zip         best on the validation part so far
        final.zip        at the end of the training

A `.zip` is what Stable-Baselines3 saves, or `save_weights` for a trainer that does not use it.
Deciding needs only the weights in it, and neither SB3's pickles nor its spaces, so that one file
serves any pool size. The network's definition does need the training packages to be installed.
What has no network (`train.py --algo cma`) has the name of a policy in config.yaml.
"""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from numpy.typing import NDArray

from envs.kernel.replay import LARGEST
from envs.state import (
    CLUSTER_FEATURES,
    DECODE_FEATURES,
    PREFILL_FEATURES,
    REQUEST_FEATURES,
    Observation,
)

from .policy import Policy, PolicyError

if TYPE_CHECKING:
    from .networks import SetScorer

FORMAT = 1
NETWORK = "set-scorer/2"
WEIGHTS = "scorer."  # how the names of its weights begin in a file
TABLES = {
    "request": REQUEST_FEATURES,
    "prefill": PREFILL_FEATURES,
    "decode": DECODE_FEATURES,
    "cluster": CLUSTER_FEATURES,
}
# What reading a damaged file, or one of something else, raises.
UNREADABLE = (
    OSError,
    zipfile.BadZipFile,
    KeyError,
    RuntimeError,
    ValueError,
    EOFError,
    UnpicklingError,
)


def observation_schema() -> dict[str, Any]:
    """What a policy reads: the columns of the four tables in order, and a hash of them."""
    columns = {name: list(features.names or ()) for name, features in TABLES.items()}
    digest = hashlib.sha256(json.dumps([columns, LARGEST]).encode()).hexdigest()
    return {**columns, "sha256": digest[:16]}


def check_schema(file: Path, stored: Any) -> None:
    """Whether a policy reads the observation of this version.

    Raises:
        PolicyError: it does not; naming the file, the table and the columns that differ.
    """
    ours = observation_schema()
    if not isinstance(stored, dict) or not set(ours) <= set(stored):
        raise PolicyError(f"{file}: 'observation' must name {', '.join(ours)}, found {stored!r}")
    if stored == ours:
        return
    for table in TABLES:
        theirs = list(stored[table] or ())
        if theirs != ours[table]:
            missing = [name for name in theirs if name not in ours[table]]
            added = [name for name in ours[table] if name not in theirs]
            difference = "; ".join(
                text
                for text, names in (
                    (f"it reads {', '.join(missing)}, which is gone", missing),
                    (f"{', '.join(added)} is new", added),
                    ("the order of the columns differs", not missing and not added),
                )
                if names
            )
            raise PolicyError(f"{file}: trained on another observation: table {table!r}: {difference}; train it anew")
    raise PolicyError(
        f"{file}: the observation's sha256 is {stored['sha256']!r}, expected {ours['sha256']!r} for these columns"
    )


def read_config(folder: Path) -> dict[str, Any]:
    """The contents of `config.yaml`, with its format and observation schema checked, and its network or policy.

    Raises:
        PolicyError: naming the file and what was expected.
    """
    file = folder / "config.yaml"
    try:
        config = yaml.safe_load(file.read_text())
    except FileNotFoundError:
        raise PolicyError(f"{folder} is no run folder of train.py: it has no config.yaml") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise PolicyError(f"{file}: cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        found = config.get("format") if isinstance(config, dict) else config
        raise PolicyError(f"{file}: expected a run folder of format {FORMAT}, found {found!r}")
    network = config.get("network")
    if network is None and isinstance(config.get("policy"), str):
        return config
    if not isinstance(network, dict) or network.get("kind") != NETWORK:
        raise PolicyError(f"{file}: expected network.kind {NETWORK!r}, found {network!r}")
    if not isinstance(network.get("hidden"), int) or network["hidden"] < 1:
        raise PolicyError(f"{file}: network.hidden must be a whole number above 0, found {network.get('hidden')!r}")
    if not isinstance(network.get("anchored"), bool):
        raise PolicyError(f"{file}: network.anchored must be true or false, found {network.get('anchored')!r}")
    check_schema(file, config.get("observation"))
    return config


def write_policy(folder: Path, policy: str) -> None:
    """Make a run without network be the policy of this name."""
    config = read_config(folder) | {"policy": policy}
    write_atomically(folder / "config.yaml", yaml.safe_dump(config, sort_keys=False))


def write_atomically(file: Path, text: str) -> None:
    """Write a file so that a reader never sees half of it."""
    unfinished = file.with_name(file.name + ".unfinished")
    unfinished.write_text(text)
    unfinished.replace(file)


def checkpoint_file(folder: Path, steps: int) -> Path:
    """Where the checkpoint after `steps` steps lies."""
    return folder / "checkpoints" / f"steps_{steps:012d}.zip"


def last_checkpoint(folder: Path) -> Path | None:
    """`final.zip`, or the checkpoint with most steps; None where there is neither."""
    if (folder / "final.zip").is_file():
        return folder / "final.zip"
    return max((folder / "checkpoints").glob("steps_*.zip"), default=None)


def float32_tables(observation: Observation) -> dict[str, NDArray[np.float32]]:
    """The tables as training sees them: float32, cut to +-1e9; `request` [C, 5], ..."""
    tables = {}
    for name, features in TABLES.items():
        table = np.ascontiguousarray(getattr(observation, name))
        values = table.view(np.float64).reshape(*table.shape, len(features.names or ()))
        tables[name] = np.clip(values, -LARGEST, LARGEST).astype(np.float32)
    return {**tables, "request": tables["request"][:, 0], "cluster": tables["cluster"][:, 0]}


def action_masks(observation: Observation) -> NDArray[np.bool_]:
    """Which actions are valid, bool[C, 1 + P D 3], as `envs.kernel.replay.show` has it."""
    sources = observation.prefill_mask[:, :, None, :] != 0
    pairs = sources & (observation.decode_mask[:, None, :, None] != 0)
    always = np.ones((len(pairs), 1), np.bool_)
    return np.concatenate([always, pairs.reshape(len(pairs), -1)], axis=1)


def weights_of(scorer: SetScorer) -> dict[str, Any]:
    """A scorer's weights by their names in a file."""
    return {f"{WEIGHTS}{name}": value for name, value in scorer.state_dict().items()}


def save_weights(file: Path, weights: Mapping[str, Any], training: Mapping[str, Any]) -> None:
    """Save what `load_weights` and `load_training` read, so that a reader never sees half of it.

    Args:
        weights: tensors by name; the scorer's are `scorer.NAME`, others are the trainer's own.
        training: what the trainer needs to go on: numbers, tensors, and mappings and lists of them.
    """
    import torch

    unfinished = file.with_name(file.name + ".unfinished")
    with zipfile.ZipFile(unfinished, "w") as archive:
        for name, content in (("policy.pth", weights), ("training.pth", training)):
            with archive.open(name, "w") as entry:
                torch.save(dict(content), entry)
    unfinished.replace(file)


def load_training(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The weights and the rest that `save_weights` saved.

    Raises:
        PolicyError: the file is damaged or another trainer's.
    """
    import torch

    try:
        with zipfile.ZipFile(file) as archive:
            weights, training = (
                torch.load(archive.open(name), map_location="cpu", weights_only=True)
                for name in ("policy.pth", "training.pth")
            )
    except UNREADABLE as error:
        reason = " ".join(str(error).split())
        raise PolicyError(f"{file}: cannot go on from it: {reason}") from None
    return weights, training


def load_weights(file: Path, network: Mapping[str, Any]) -> SetScorer:
    """The scorer in a file of a run folder.

    Args:
        network: that of the run's config.yaml.

    Raises:
        PolicyError: no such file, damaged, or weights of another network.
    """
    try:
        import torch

        from .networks import SetScorer
    except ImportError as error:
        raise PolicyError(f"a run folder needs {error.name}: pip install 'conductor-gym[train]'") from None
    hidden = network["hidden"]
    scorer = SetScorer(hidden, network["anchored"])
    try:
        with zipfile.ZipFile(file) as archive, archive.open("policy.pth") as weights:
            saved = torch.load(weights, map_location="cpu", weights_only=True)
        scorer.load_state_dict({name.removeprefix(WEIGHTS): w for name, w in saved.items() if name.startswith(WEIGHTS)})
    except FileNotFoundError:
        raise PolicyError(f"{file}: no such file") from None
    except UNREADABLE as error:
        reason = " ".join(str(error).split())
        raise PolicyError(f"{file}: expected weights of {NETWORK} with {hidden} hidden units: {reason}") from None
    return scorer.eval()


def load_run_weights(path: Path, hidden: int) -> SetScorer:
    """The scorer to start from: the best of the run in `path`, else of its last checkpoint.

    Raises:
        PolicyError: no such run, or of another kind of network.
    """
    network = read_config(path).get("network")
    if network is None or network["anchored"] or network["hidden"] != hidden:
        expected = f"a network with {hidden} hidden units, not anchored"
        raise PolicyError(f"--init {path}: expected {expected}, found {network!r}")
    file = path / "best.zip" if (path / "best.zip").is_file() else last_checkpoint(path)
    if file is None:
        raise PolicyError(f"--init {path}: it has neither best.zip nor a checkpoint")
    return load_weights(file, network)


def load_run(path: Path) -> Policy:
    """The policy in a run folder: the best on validation, else the last checkpoint, saying so.

    Raises:
        PolicyError: naming the file and what was expected.
    """
    path = Path(path)
    config = read_config(path)
    if config.get("network") is None:
        from .registry import make_policy

        return make_policy(config["policy"])
    file = path / "best.zip"
    if not file.is_file():
        last = last_checkpoint(path)
        if last is None:
            raise PolicyError(f"{path} has neither best.zip nor a checkpoint: the training saved nothing")
        print(f"{path}: no best.zip, taking the last checkpoint {last.name}", file=sys.stderr)
        file = last
    from .registry import compiled_policy

    return compiled_policy(load_weights(file, config["network"]), str(path), bool(config.get("recheck", True)))
