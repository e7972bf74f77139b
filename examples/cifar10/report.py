"""Reports the results of a run: loss curves, accuracies, pictures and a summary."""

from typing import Any

import lightning as L
from data import CLASSES, IGNORED
from model import Classifier
from pictures import draw_confusion, draw_predictions
from torch import Tensor

from lightning_zero.callbacks import RunReport


class Report(RunReport):
    """Measures a run and its test, and writes the results.

    Args:
        run_dir: Folder to write to.
        strategy: Name of the strategy, for the summary.
        images_per_step: Images per optimizer step, over all ranks.
    """

    def __init__(self, run_dir: str, strategy: str, images_per_step: int) -> None:
        super().__init__(run_dir, strategy, images_per_step, unit="images", loss_unit="nats per image")

    def on_test_batch_end(
        self, trainer: L.Trainer, model: Classifier, logits: Tensor, batch: Any, batch_idx: int, *_
    ) -> None:
        if batch_idx == 0:  # rank 0 has the first images of the data set
            pixels, labels = batch
            real = labels != IGNORED
            self.shown = tuple(tensor[real].cpu() for tensor in (pixels, labels, logits.softmax(dim=-1)))

    def on_test_epoch_end(self, trainer: L.Trainer, model: Classifier) -> None:
        """Compute metrics that are no scalars, over all ranks; a class without test images has no accuracy."""
        self.confusion = model.confusion.compute().cpu()
        accuracies = zip(model.class_accuracy.compute().tolist(), self.confusion.sum(dim=1).tolist(), strict=True)
        self.class_accuracy = [round(accuracy, 4) if count else None for accuracy, count in accuracies]

    def on_test_end(self, trainer: L.Trainer, model: Classifier) -> None:
        self.test_loss, self.test_accuracy = (
            float(trainer.callback_metrics[f"test_{k}"]) for k in ("loss", "accuracy")
        )

    def summary(self, trainer: L.Trainer) -> dict[str, Any]:
        """The key figures of the run, including those of the test."""
        by_class = dict(zip(CLASSES, self.class_accuracy, strict=True))
        test = {"test_accuracy": self.test_accuracy, "test_loss": self.test_loss, "class_accuracy": by_class}
        return {**test, **super().summary(trainer)}

    def table(self) -> str:
        """The accuracy of each class and of all test images, as lines of text."""
        counts = self.confusion.sum(dim=1).tolist()
        rows = [*zip(CLASSES, counts, self.class_accuracy, strict=True), ("all", sum(counts), self.test_accuracy)]
        lines = [f"{name:<12}{count:>7}{'-' if part is None else f'{part:.1%}':>10}" for name, count, part in rows]
        return "\n".join([f"{'class':<12}{'images':>7}{'accuracy':>10}", *lines])

    def write(self, trainer: L.Trainer) -> None:
        """Draw the pictures and show the table as well, on rank 0."""
        if trainer.is_global_zero:
            title = f"{self.strategy}: test accuracy {self.test_accuracy:.1%}"
            draw_confusion(self.confusion, title, self.run_dir / "confusion.png")
            draw_predictions(*self.shown, self.run_dir / "predictions.png")
            print(f"\nAccuracy on the test images:\n\n{self.table()}")
        super().write(trainer)
