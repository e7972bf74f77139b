"""The buckets of a module, and lookups from parameters and submodules to buckets."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_zero.sharding.adoption import begin_to_train, give_up, make_bucket, release
from lightning_zero.sharding.bucket import Bucket, BucketState, absorb_edits
from lightning_zero.sharding.forms import BucketForm
from lightning_zero.sharding.full_precision import end_masters, show_masters, take_masters
from lightning_zero.sharding.gradients import BucketGradients
from lightning_zero.sharding.layout import Segment
from lightning_zero.sharding.partition import BucketSpec, Unit
from lightning_zero.sharding.placement import BucketPlacement
from lightning_zero.sharding.refresh import Refresher
from lightning_zero.sharding.rounded import lost_digits


class BucketMap:
    """Makes the buckets of a module and looks them up. Construction is collective.

    If it fails or is interrupted, it releases what was made; see :func:`~lightning_zero.sharding.adoption.give_up`.

    Attributes:
        module: the module tree.
        placement: the placement that the buckets share; :meth:`BucketSpec.placed` derives each bucket's own from it.
        buckets: in forward order; empty after :meth:`release`.
        gradients: the gradients of the buckets, in the same order.
        refresher: gathers stale buckets.
        root: the buckets that stay unsharded during a step.

    Args:
        module: the module tree; its parameters become views of the buckets.
        specs: the buckets' specs, from :func:`~lightning_zero.sharding.partition.partition`.
        placement: as above.
        detect_data_edits: see :class:`Bucket`.
    """

    def __init__(
        self,
        module: nn.Module,
        specs: Sequence[BucketSpec],
        placement: BucketPlacement,
        detect_data_edits: bool = False,
    ) -> None:
        self.module = module
        self.placement = placement
        self.buckets: list[Bucket] = []
        try:
            for number, spec in enumerate(specs):
                form = BucketForm(spec, placement)
                self.buckets.append(make_bucket(_name(number, spec), form, detect_data_edits))
        except BaseException:
            while self.buckets:
                give_up(self.buckets.pop())
            raise
        self.refresher = Refresher(placement.mesh, self.buckets)
        self.root = [bucket for bucket, spec in zip(self.buckets, specs, strict=True) if spec.in_root]
        self.gradients = [BucketGradients(bucket) for bucket in self.buckets]
        self._gradients = {id(gradients.bucket): gradients for gradients in self.gradients}
        self._holder = {id(p): bucket for bucket in self.buckets for p in bucket.parameters}

    def tensors(self) -> list[Tensor]:
        """Lists the tensors that stay on the device between steps: flat buffers, even if freed, and module buffers."""
        return [*(bucket.flat for bucket in self.buckets), *self.module.buffers()]

    def holder(self, parameter: Tensor) -> Bucket | None:
        """The bucket that holds ``parameter``, or ``None``."""
        return self._holder.get(id(parameter))

    def __getitem__(self, parameter: Tensor) -> Bucket:
        """The bucket that holds ``parameter``.

        Raises:
            KeyError: no bucket holds it.
        """
        return self._holder[id(parameter)]

    def gradients_of(self, bucket: Bucket) -> BucketGradients:
        """The gradients of ``bucket``."""
        return self._gradients[id(bucket)]

    def holders(self, parameters: Iterable[Tensor]) -> list[Bucket]:
        """The buckets that hold any of ``parameters``, each once, in the order of the parameters."""
        return list({id(b): b for p in parameters if (b := self.holder(p)) is not None}.values())

    def read_by(self, module: nn.Module, recurse: bool = True) -> list[Bucket]:
        """The buckets that the forward of ``module`` reads; for the root module also those of the root."""
        held = list({id(b): b for b in map(self.__getitem__, module.parameters(recurse=recurse))}.values())
        return [*held, *(b for b in self.root if b not in held)] if module is self.module else held

    def own(self, unit: Unit) -> list[Bucket]:
        """The buckets that a unit frees; buckets that it shares with the root stay unsharded during a step."""
        return [b for b in self.read_by(unit.module) if b not in self.root]

    def segments_of(self, parameters: Iterable[Tensor]) -> Iterator[tuple[Bucket, list[Segment]]]:
        """This rank's segments of ``parameters``, grouped by bucket; buckets without any are left out."""
        chosen = {id(p) for p in parameters}
        for bucket in self.buckets:
            segments = [s for s in bucket.segments if id(bucket.parameters[s.param]) in chosen]
            if segments:
                yield bucket, segments

    def absorb_edits(self) -> None:
        """Take over edits of gathered parameters by user code, made in place or by assigning ``data``.

        Edits made in place through ``data`` are found only in buckets with ``detect_data_edits``.
        """
        absorb_edits([bucket for bucket in self.buckets if bucket.state is BucketState.GATHERED])

    def full(self, parameter: Tensor) -> Tensor:
        """The full-precision values of one parameter, of its shape, including edits by user code. Collective."""
        bucket = self[parameter]
        self.absorb_edits()
        return bucket.view(bucket.gather_master(), bucket.index[id(parameter)]).clone()

    @contextlib.contextmanager
    def gathered(
        self,
        parameters: Iterable[Parameter],
        writeback: bool,
        full_precision: bool,
        hold_saved: Callable[[Iterable[Bucket]], None],
    ) -> Iterator[None]:
        """Hold ``parameters`` unsharded inside the context; see :meth:`lightning_zero.engine.Engine.gathered`.

        Args:
            parameters: some of the module's.
            writeback: as there.
            full_precision: as there.
            hold_saved: called at the end with the buckets; pins those that backward may read.
        """
        chosen = set(self.holders(parameters))
        buckets = [bucket for bucket in self.buckets if bucket in chosen]
        # A unit that is computing has gathered its own, and frees them; the end of a step frees others that are.
        in_use = {bucket for bucket in buckets if bucket.state is BucketState.GATHERED}
        masters_shown = self._hold(buckets, full_precision, in_use)
        try:
            yield
            hold_saved(buckets)
            for bucket in buckets:
                bucket.saved |= torch.is_grad_enabled()
        finally:
            for bucket in masters_shown:
                end_masters(bucket, writeback)
            # Parameters that are not freed show the new values, as do those of an outer context.
            again = [b for b in masters_shown if b.pins > 1 or b in in_use or not b.shards_params]
            for bucket in again:
                bucket.begin_unshard()
            for bucket in again:
                bucket.unshard()
            for bucket in buckets:
                bucket.unpin()  # first: an error below must not leave it pinned
                if bucket.full is not None:  # an outer context shows masters
                    if writeback:
                        take_masters(bucket, writeback=True)
                elif bucket.state is BucketState.GATHERED:
                    bucket.absorb_edits()
                    if writeback:
                        bucket.await_update()
                        self.placement.mesh.world.broadcast_(bucket.flat, f"write back {bucket.name}")
                        bucket.absorb_edits(everything=True)
                if bucket not in in_use:
                    bucket.reshard()

    def _hold(self, buckets: Sequence[Bucket], full_precision: bool, in_use: Collection[Bucket]) -> list[Bucket]:
        """Unshard buckets and keep them so. If that fails, as where memory runs out, none of them stays held.

        Returns:
            Those that show masters in another tensor.
        """
        held, masters_shown = list[Bucket](), list[Bucket]()
        try:
            for bucket in buckets:
                bucket.pin()
                held.append(bucket)
                if not full_precision:
                    bucket.unshard()
                elif show_masters(bucket):
                    masters_shown.append(bucket)
        except BaseException:
            for bucket in masters_shown:
                end_masters(bucket, writeback=False)
            for bucket in held:
                bucket.unpin()
            for bucket in held:
                if bucket not in in_use:
                    bucket.reshard()
            raise
        return masters_shown

    def begin_to_train(self) -> BucketPlacement:
        """Make the masters of buckets that were made for evaluation only. The same call on all ranks.

        Returns:
            The placement that is valid from now on.
        """
        if not self.placement.trains:
            self.placement = self.placement._replace(trains=True)
            for bucket in self.buckets:
                begin_to_train(bucket)
        return self.placement

    def check_exact(self) -> None:
        """Check that no parameter was rounded by a cast without a master (see ``rounded.py``).

        Raises:
            ValueError: a parameter was rounded; the message names it.
        """
        for bucket in self.buckets:
            for index in bucket.rounded:
                raise lost_digits(bucket.names[index], bucket.dtype, bucket.master.dtype)

    def release(self) -> None:
        """Give every parameter an ordinary tensor at full precision and forget the buckets. Collective."""
        for bucket in self.buckets:
            release(bucket)
        self.placement.optimizer_store.close()
        self.buckets, self.root, self._holder = [], [], {}
        self.gradients, self._gradients = [], {}


def _name(number: int, spec: BucketSpec) -> str:
    """The name of a bucket in messages."""
    first, *others = spec.units
    return f"{first}{f' ... {others[-1]}' if others else ''} (bucket {number})"
