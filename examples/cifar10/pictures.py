"""Pictures of a classifier's results: the confusion matrix, and test images with their predicted classes."""

from pathlib import Path

import torch
from data import CLASSES
from matplotlib.figure import Figure
from torch import Tensor

COLUMNS, ROWS = 8, 5  # numbers of images on the sheet
CAPTION, MARGIN = 14, 3  # pixels above and beside each image
HEIGHT, WIDTH = CAPTION + 32, MARGIN + 32 + MARGIN


def draw_confusion(counts: Tensor, title: str, path: Path) -> None:
    """Draw how many images of each class (row) were classified as which class (column); shades are fractions of a row.

    Args:
        counts: K K, int64.
        title: Title of the picture.
        path: File to write.
    """
    parts = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
    figure = Figure(figsize=(7.5, 7), layout="constrained")
    axes = figure.add_subplot(xlabel="predicted class", ylabel="true class", title=title)
    image = axes.imshow(parts, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, label="part of the true class", shrink=0.8)
    axes.set_xticks(range(len(CLASSES)), CLASSES, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(CLASSES)), CLASSES)
    for row, column in counts.nonzero().tolist():
        color = "white" if parts[row, column] > 0.5 else "black"
        axes.text(column, row, str(int(counts[row, column])), ha="center", va="center", color=color, fontsize=9)
    figure.savefig(path, dpi=150)


def draw_predictions(pixels: Tensor, labels: Tensor, probabilities: Tensor, path: Path) -> None:
    """Draw the first images with their predicted class and its probability, and the true class if they differ.

    Args:
        pixels: N 3 32 32, from -1 to 1.
        labels: N, int64.
        probabilities: N K.
        path: File to write.
    """
    shown = list(zip(pixels, labels.tolist(), probabilities, strict=True))[: COLUMNS * ROWS]
    sheet = torch.ones(ROWS * HEIGHT, COLUMNS * WIDTH, 3)
    figure = Figure(figsize=(11, 11 * sheet.shape[0] / sheet.shape[1]))
    axes = figure.add_axes((0, 0.02, 1, 0.94))
    axes.set_axis_off()
    right = 0
    for index, (image, truth, distribution) in enumerate(shown):
        top, left = index // COLUMNS * HEIGHT + CAPTION, index % COLUMNS * WIDTH + MARGIN
        sheet[top : top + 32, left : left + 32] = (image.permute(1, 2, 0) + 1) / 2  # 32 32 3, from 0 to 1
        probability, predicted = distribution.max(dim=0)
        correct = int(predicted) == truth
        right += correct
        text = f"{CLASSES[predicted]} {probability:.0%}" + ("" if correct else f"\nis: {CLASSES[truth]}")
        color = "tab:green" if correct else "tab:red"
        axes.text(left + 16, top - 1.5, text, ha="center", va="bottom", fontsize=9, color=color)
    axes.imshow(sheet)
    figure.suptitle(f"test images and their predicted classes: {right} of {len(shown)} right")
    figure.savefig(path, dpi=150)
