"""Frozen configuration sections: each component receives its own, never the whole tree.

The prose under each field is the help text of its command-line flag and its row in the docs.
"""

from quire.config.cache import CacheConfig
from quire.config.engine import Decision, EngineConfig
from quire.config.model import ModelConfig
from quire.config.observability import ObservabilityConfig
from quire.config.pooler_spec import PoolerSpec
from quire.config.pooling import read_pooler
from quire.config.recovery import RecoveryConfig
from quire.config.scheduler import SchedulerConfig
from quire.config.server import ServerConfig
from quire.config.shape import ModelShape

__all__ = [
    "CacheConfig",
    "Decision",
    "EngineConfig",
    "ModelConfig",
    "ModelShape",
    "ObservabilityConfig",
    "RecoveryConfig",
    "PoolerSpec",
    "SchedulerConfig",
    "ServerConfig",
    "read_pooler",
]
