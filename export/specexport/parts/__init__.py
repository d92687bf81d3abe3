"""What is exported: the target and whatever drafts for it. See :mod:`specexport.parts.base`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specexport.errors import SourceError
from specexport.parts import mtp_layers
from specexport.parts.assistant import Assistant
from specexport.parts.base import DrafterPart, TargetPart
from specexport.parts.draft_model import DraftModel
from specexport.parts.early_exit import EarlyExit, TargetInParts
from specexport.parts.target import TorchOnly, WholeTarget
from specexport.sources import Source
from specrun.contract import FRONT_ENGINE
from specrun.errors import UsageError

if TYPE_CHECKING:
    from specexport.options import ExportOptions
    from specrun.manifest import DraftMethod, Manifest


def plan(
    target: Source, drafters: Sequence[Source], options: ExportOptions
) -> tuple[TargetPart, list[DrafterPart]]:
    """The parts of an export. Raises UsageError where two drafters are for the same method, or
    without the target nothing is left."""
    chosen: TargetPart = TorchOnly(target) if options.skip_target else WholeTarget(target)
    drafting = [_drafter(source, target) for source in drafters]
    if options.early_exit is not None:
        chosen = TargetInParts(target, options.early_exit)
        drafting.append(EarlyExit(target, options.early_exit))
    if (own := mtp_layers.part(target, options.mtp_layers)) is not None:
        drafting.append(own)
    _check_methods(drafting)
    if options.skip_target and not drafting:
        raise UsageError(
            "skip: without the target there is nothing to export, as there is no drafter",
            hint="give a drafter with --drafter, or leave --skip out",
        )
    return chosen, drafting


def of_folder(made: Manifest, target: Source, drafters: Sequence[Source]) -> list[DrafterPart]:
    """The parts of a folder that was exported from these. Raises SourceError where one lacks."""
    drafting = [_drafter(source, target) for source in drafters]
    if (own := mtp_layers.part(target, "mtp" in made.drafters)) is not None:
        drafting.append(own)
    if (front := made.engines.get(FRONT_ENGINE)) is not None:
        assert front.split is not None, "the manifest refuses a front without it"
        drafting.append(EarlyExit(target, front.split.early_exit))
    _check_methods(drafting)
    given = {part.method: part for part in drafting}
    for source, part in zip(drafters, drafting, strict=False):
        _check_same(made, part.method, source)
    for method, drafter in made.drafters.items():
        if method not in given and drafter.source is not None:
            raise SourceError(
                f"the folder has a drafter ({drafter.source.id}, for {method}), and none is given"
                " to compare it with",
                hint="give it with --drafter",
            )
    return [given[method] for method in made.drafters if method in given]


def _check_same(made: Manifest, method: DraftMethod, source: Source) -> None:
    """A drafter that is given has the shape of the folder's."""
    there = made.drafters.get(method)
    have = None if there is None or there.source is None else there.source.architecture
    if have != source.architecture:
        has = "none" if have is None else f"a {have}"
        raise SourceError(
            f"{source.id}: is a {source.architecture} for {method}, the folder has {has}",
            hint="give the drafters that the folder was exported with",
        )


def _drafter(source: Source, target: Source) -> DrafterPart:
    if source.is_assistant:
        return Assistant(source, target)
    return DraftModel(source, target)


def _check_methods(drafting: Sequence[DrafterPart]) -> None:
    seen: set[str] = set()
    for part in drafting:
        if part.method in seen:
            raise UsageError(
                f"two drafters are for the method {part.method}",
                hint="give one drafter per method",
            )
        seen.add(part.method)


__all__ = ["of_folder", "plan"]
