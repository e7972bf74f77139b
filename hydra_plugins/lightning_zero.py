"""Hydra's search-path plugin: the groups of `lightning_zero.conf` compose in every application.

Hydra finds this module by its place, and imports it in applications that use nothing of `lightning_zero`; so it
imports neither torch nor lightning.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class LightningZeroSearchPath(SearchPathPlugin):
    """Puts the groups and their schemas behind the application's own, which win where names are the same."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        from lightning_zero.config.schemas import register_schemas

        register_schemas()
        search_path.append(provider="lightning_zero", path="pkg://lightning_zero.conf")
