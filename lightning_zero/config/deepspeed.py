"""Writes an imported DeepSpeed configuration as a YAML file for Hydra."""

from lightning_zero.config import files
from lightning_zero.migration import Import, Status

_REMARKS = {"data.batch_size": "samples of an optimizer step, over all ranks and micro-batches"}


def to_yaml(imported: Import, *, experiment: bool = False) -> str:
    """Writes the groups and settings of an import as YAML.

    Args:
        imported: the import.
        experiment: write a file for the group `experiment` of an application, which overrides the application's
            groups; default: a configuration of its own, with every group.
    """
    remarks = [f"{imported.name or 'A DeepSpeed configuration'} in terms of lightning_zero.", *_remarks(imported)]
    notes = _REMARKS | imported.sources
    return files.to_yaml(remarks, imported.groups, imported.settings, notes, experiment=experiment)


def _remarks(imported: Import) -> list[str]:
    """Lists what the file leaves to its reader."""
    remarks = []
    for status, title in (
        (Status.open, 'Left open, "auto" in the file'),
        (Status.unsupported, "Not supported"),
        (Status.unknown, "Unknown to DeepSpeed"),
    ):
        if rows := imported.of(status):
            remarks += [f"{title}:", *(f"  {row.key}: {row.note}" for row in rows)]
    if imported.micro_batch is not None:
        remarks.append(f"The DataLoader of a rank takes {imported.micro_batch} samples at once.")
    return remarks
