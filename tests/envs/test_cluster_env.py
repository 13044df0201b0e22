"""The Gymnasium and Stable-Baselines3 faces."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

from envs.cluster_env import ClusterEnv, ClusterVectorEnv, Episodes, Rewards
from envs.state import OUTCOME, Status
from policies import make_policy
from traces import Trace, builtin

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def trace() -> Trace:
    return builtin("conversation", seed=3, n_requests=900)


def make(trace: Trace, **kwargs) -> ClusterEnv:
    return ClusterEnv("2p2d", trace, "all", kwargs.pop("episodes", Episodes(120, load=(0.2, 0.6))), **kwargs)


def random_step(env: ClusterEnv, rng: np.random.Generator):
    return env.step(rng.choice(np.flatnonzero(env.action_masks())))


def test_gymnasium_finds_it_without_other_imports() -> None:
    code = (
        "import gymnasium as gym\n"
        "env = gym.make('envs:conductor/Cluster-v0')\n"
        "obs, info = env.reset(seed=1)\n"
        "assert env.observation_space.contains(obs)\n"
        "assert env.spec.id == 'conductor/Cluster-v0'\n"
        "env = gym.make_vec('envs:conductor/Cluster-v0', num_envs=3, vectorization_mode='vector_entry_point')\n"
        "assert env.reset(seed=1)[0]['prefill'].shape[0] == 3\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_gymnasium_check_env_has_nothing_to_say(trace: Trace) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gym.make("conductor/Cluster-v0", cluster="2p2d", trace=trace, part="all", episodes=Episodes(50))
        check_env(env.unwrapped)


def test_sb3_check_env(trace: Trace) -> None:
    sb3 = pytest.importorskip("stable_baselines3.common.env_checker")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # a table per pool is what a Dict observation is for; SB3 flattens it, and says so
        warnings.filterwarnings("ignore", message=".*unconventional shape.*")
        sb3.check_env(make(trace))


def test_same_seed_same_everything(trace: Trace) -> None:
    runs = []
    for _ in range(2):
        env = make(trace)
        rng = np.random.default_rng(5)
        steps = [env.reset(seed=11)]
        done = False
        while not done:
            steps.append(random_step(env, rng))
            done = steps[-1][2]
        runs.append((steps, env.outcomes()))
    first, second = runs
    assert len(first[0]) == 121
    for a, b in zip(first[0], second[0], strict=True):
        for name in a[0]:
            np.testing.assert_array_equal(a[0][name], b[0][name])
        np.testing.assert_equal(a[-1], b[-1])
        assert a[1:-1] == b[1:-1]
    assert first[1].tobytes() == second[1].tobytes()
    assert not np.array_equal(make(trace).reset(seed=12)[0]["request"], first[0][0][0]["request"])


def test_rewards_add_up_to_good_requests(trace: Trace) -> None:
    env = make(trace)
    rng = np.random.default_rng(0)
    env.reset(seed=0)
    total, done, info = 0.0, False, {}
    while not done:
        _, reward, done, truncated, info = random_step(env, rng)
        assert not truncated
        total += reward
    outcomes = env.outcomes()
    assert outcomes.dtype == OUTCOME
    assert len(outcomes) == 120
    assert not (outcomes["status"] == Status.OPEN).any()
    assert total == outcomes["good"].sum() == info["good"]
    ended = info["good"] + info["violated"] + info["rejected_at_arrival"] + info["rejected_at_decode"]
    assert ended == 120


def test_rewards_are_weighed(trace: Trace) -> None:
    env = make(trace, rewards=Rewards(good=0.0, rejected_at_arrival=-2.0))
    env.reset(seed=0)
    assert env.step(0)[1] == -2.0


def test_reset_options(trace: Trace) -> None:
    env = make(trace)
    _, info = env.reset(seed=0, options={"start": 7, "load": 2.0})
    assert (info["start"], info["load"]) == (7, 2.0)
    assert env.observation.request["input_tokens"][0, 0] == trace.input_tokens[7]
    with pytest.raises(ValueError, match="unknown reset options.*'foo'"):
        env.reset(options={"foo": 1})
    with pytest.raises(ValueError, match="'start' is 10000"):
        env.reset(options={"start": 10_000})
    with pytest.raises(ValueError, match="'load' is 0"):
        env.reset(options={"load": 0})


def test_actions_out_of_range_are_refused(trace: Trace) -> None:
    env = make(trace)
    env.reset(seed=0)
    for action in (-1, env.action_space.n):
        with pytest.raises(ValueError, match="expected 1 actions"):
            env.step(action)


def test_masked_actions_degrade(trace: Trace) -> None:
    """Recomputing with nothing to reuse is the same as local; the outcome says what happened."""
    env = make(trace)
    env.reset(seed=0)
    mask = env.action_masks()
    assert mask[0]
    assert mask[1]
    assert not mask[2]  # an empty cluster has nothing to fetch
    assert not mask[3]
    env.step(2)
    assert env.outcomes()["source"][0] == 0


def test_render_draws_a_picture(trace: Trace) -> None:
    env = make(trace, render_mode="rgb_array")
    env.reset(seed=0)
    rng = np.random.default_rng(0)
    for _ in range(30):
        random_step(env, rng)
    picture = env.render()
    assert picture is not None
    assert picture.shape == (600, 900, 3)
    assert picture.dtype == np.uint8
    assert len(np.unique(picture)) > 10
    with pytest.raises(ValueError, match="render_mode 'human'"):
        make(trace, render_mode="human")


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_vector_env_equals_single_envs(trace: Trace, mode: AutoresetMode) -> None:
    count = 3
    episodes = Episodes(40, load=(0.2, 0.6))
    vector = ClusterVectorEnv(count, "2p2d", trace, "all", episodes, autoreset_mode=mode)
    singles = [ClusterEnv("2p2d", trace, "all", episodes) for _ in range(count)]
    observations, _ = vector.reset(seed=4)
    alone = [env.reset(seed=4 + i)[0] for i, env in enumerate(singles)]
    rngs = [np.random.default_rng(4 + i) for i in range(count)]  # as the environments draw their episodes
    for i, env in enumerate(singles):
        env.np_random = rngs[i]
        alone[i] = env.reset()[0]
    chooser = np.random.default_rng(0)
    ended = np.zeros(count, bool)
    for _ in range(95):
        for name, table in observations.items():
            np.testing.assert_array_equal(table, np.stack([o[name] for o in alone]))
        actions = np.array([chooser.choice(np.flatnonzero(m)) for m in vector.action_masks()])
        observations, rewards, terminated, _, info = vector.step(actions)
        for i, env in enumerate(singles):
            if ended[i] and mode == AutoresetMode.NEXT_STEP:
                alone[i] = env.reset()[0]
                assert rewards[i] == 0
                assert not terminated[i]
                ended[i] = False
                continue
            alone[i], reward, done, _, _ = env.step(actions[i])
            assert rewards[i] == reward
            assert terminated[i] == done
            if done and mode == AutoresetMode.SAME_STEP:
                for name, table in alone[i].items():
                    np.testing.assert_array_equal(info["final_obs"][i][name], table)
                alone[i] = env.reset()[0]
            ended[i] = done


def test_vector_env_without_autoreset(trace: Trace) -> None:
    vector = ClusterVectorEnv(3, "2p2d", trace, "all", Episodes(6), autoreset_mode=AutoresetMode.DISABLED)
    vector.reset(seed=1)
    for _ in range(6):
        _, _, terminated, _, _ = vector.step(np.ones(3, np.int64))
    assert terminated.all()
    arrived = vector.simulator.batch.state.clock["arrived"][:, 0]
    vector.reset(options={"reset_mask": np.array([False, True, False])})
    assert arrived.tolist() == [6, 1, 6]
    _, rewards, terminated, _, _ = vector.step(np.ones(3, np.int64))
    assert terminated.tolist() == [True, False, True]
    assert rewards[[0, 2]].tolist() == [0, 0]
    with pytest.raises(ValueError, match="reset_mask"):
        vector.reset(options={"reset_mask": [True]})


def test_sb3_vec_env_equals_vector_env(trace: Trace) -> None:
    sb3 = pytest.importorskip("envs.sb3")
    episodes = Episodes(40, load=(0.2, 0.6))
    ours = sb3.ClusterVecEnv(3, "2p2d", trace, "all", episodes)
    vector = ClusterVectorEnv(3, "2p2d", trace, "all", episodes, autoreset_mode=AutoresetMode.SAME_STEP)
    ours.seed(9)
    a, (b, _) = ours.reset(), vector.reset(seed=9)
    chooser = np.random.default_rng(1)
    ended = 0
    for _ in range(90):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])
        np.testing.assert_array_equal(ours.action_masks(), vector.action_masks())
        actions = np.array([chooser.choice(np.flatnonzero(m)) for m in vector.action_masks()])
        a, rewards, dones, infos = ours.step(actions)
        b, expected, terminated, _, _ = vector.step(actions)
        np.testing.assert_array_equal(rewards, expected.astype(np.float32))
        np.testing.assert_array_equal(dones, terminated)
        for i in np.flatnonzero(dones):
            ended += 1
            episode = infos[i]["episode"]
            assert episode["l"] == 40
            assert episode["r"] == episode["good"]
            assert set(infos[i]["terminal_observation"]) == set(a)
    assert ended == 6


def test_maskable_ppo_learns_a_step(trace: Trace) -> None:
    sb3 = pytest.importorskip("envs.sb3")
    maskable = pytest.importorskip("sb3_contrib").MaskablePPO
    env = sb3.ClusterVecEnv(2, "2p2d", trace, "all", Episodes(50))
    env.seed(0)
    model = maskable("MultiInputPolicy", env, n_steps=32, batch_size=64, n_epochs=1, seed=0, device="cpu")
    model.learn(64)
    actions, _ = model.predict(env.reset(), action_masks=env.action_masks())
    assert env.action_masks()[np.arange(2), actions].all()


def test_domain_randomisation(trace: Trace) -> None:
    episodes = Episodes(40, load=(0.5, 2.0), prefill_up=(1, 2), decode_up=(1, 3), hardware=(0.5, 2.0))
    env = ClusterEnv("3p3d", trace, "all", episodes)
    ups, speeds = set(), set()
    for seed in range(12):
        env.reset(seed=seed)
        state = env.simulator.batch.state
        ups.add((int(state.prefill["up"].sum()), int(state.decode["up"].sum())))
        speeds.add(float(env.simulator.parameter_tables.prefill["linear_s"][0, 0]))
        mask = env.action_masks()
        for action in np.flatnonzero(mask[1:]):
            pair = action // 3
            assert state.prefill["up"][0, pair // 3]
            assert state.decode["up"][0, pair % 3]
        done = False
        policy = make_policy("conductor+predictive")
        policy.reset(1, 0)
        while not done:
            action = policy.decide(env.observation)[0]
            assert env.action_masks()[action]
            done = env.step(action)[2]
        used = env.outcomes()["prefill"]
        assert not (state.prefill["up"][0][used[used >= 0]] == 0).any()
    assert len(ups) > 3
    assert len(speeds) == 12


def test_a_drained_cluster_is_left_alone(trace: Trace) -> None:
    env = make(trace, episodes=Episodes(5))
    env.reset(seed=0)
    for _ in range(5):
        _, _, done, _, _ = env.step(1)
    assert done
    before = env.outcomes().tobytes()
    for _ in range(20):
        env.step(1)
    assert env.outcomes().tobytes() == before
    with pytest.raises(ValueError, match="no request left"):
        env.simulator.decide(0, 0, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"requests": 0}, "Episodes.requests must be a whole number above 0, found 0"),
        ({"requests": 2.5}, "Episodes.requests must be a whole number"),
        ({"load": 0}, "Episodes.load must be a number above 0"),
        ({"load": float("inf")}, "Episodes.load must be a number above 0"),
        ({"load": (2, 1)}, "Episodes.load must be a number above 0 or .low, high."),
        ({"hardware": -1}, "Episodes.hardware must be a number above 0"),
        ({"prefill_up": 3}, "Episodes.prefill_up must be .low, high."),
        ({"decode_up": (0, 0)}, "Episodes.decode_up must be .low, high. with 1 <= low"),
        ({"prefill_up": (1, 9)}, "Episodes.prefill_up is .1, 9., the cluster has 2"),
    ],
)
def test_impossible_episodes_are_refused(trace: Trace, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(trace, episodes=Episodes(**change))


def test_wrong_arguments_are_refused(trace: Trace) -> None:
    with pytest.raises(ValueError, match="part 'foo': expected one of train, validation, test, all"):
        ClusterEnv("2p2d", trace, "foo")
    with pytest.raises(ValueError, match="num_envs must be at least 1"):
        ClusterVectorEnv(0, "2p2d", trace)
    env = make(trace)
    with pytest.raises(gym.error.ResetNeeded):
        env.step(0)
    env.reset(seed=0)
    for action in (1.5, np.float64(2), float("nan"), "1"):
        with pytest.raises(ValueError, match="expected whole numbers as actions"):
            env.step(action)
    with pytest.raises(ValueError, match="'start' is 1.5"):
        env.reset(options={"start": 1.5})
    with pytest.raises(ValueError, match="9 is not a valid Source"):
        env.simulator.decide(0, 1, 1, 9)
    with pytest.raises(IndexError, match="no cluster -1 among 1"):
        env.simulator.fork(-1, 0)
