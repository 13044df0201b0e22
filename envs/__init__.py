"""A Mooncake-style LLM serving cluster as Gymnasium environments, and the types its schedulers are written against.

`gym.make("envs:conductor/Cluster-v0")` needs no other import.
"""

import gymnasium as gym

gym.register(
    id="conductor/Cluster-v0",
    entry_point="envs.cluster_env:ClusterEnv",
    vector_entry_point="envs.cluster_env:ClusterVectorEnv",
)
