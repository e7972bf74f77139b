"""Reports the results of a run: loss curves, a summary and a sampled text."""

import lightning as L
from model import LanguageModel, NotFiniteError
from tokenizer import Tokenizer

from lightning_zero import gathered_parameters
from lightning_zero.callbacks import RunReport


class Report(RunReport):
    """Measures a run and writes its results, including a sample.

    Args:
        run_dir: Folder to write to.
        strategy: Name of the strategy, for the summary.
        tokens_per_step: Tokens per optimizer step, over all ranks.
        tokenizer: Tokenizer for the prompt and the sample.
        prompt: Text that the sample continues.
        sampling: Arguments of the model's `generate`.
    """

    def __init__(
        self, run_dir: str, strategy: str, tokens_per_step: int, tokenizer: Tokenizer, prompt: str, sampling: dict
    ) -> None:
        super().__init__(run_dir, strategy, tokens_per_step, unit="tokens", loss_unit="nats per token")
        self.tokenizer, self.prompt, self.sampling = tokenizer, prompt, sampling
        self.sample = ""

    def measure(self, trainer: L.Trainer, model: L.LightningModule) -> None:
        """Sample while all ranks are still running, since sampling needs all of them."""
        super().measure(trainer, model)
        model.eval()
        with gathered_parameters(model), trainer.precision_plugin.forward_context():
            self.sample = self.sampled(model)
        model.train()

    def sampled(self, model: LanguageModel) -> str:
        """The prompt and its continuation, or the reason why there is none; a diverged run still gets its report."""
        try:
            tokens = model.generate(self.tokenizer.encode(self.prompt.encode()).tolist(), **self.sampling)
        except NotFiniteError as error:
            return f"No sample. {error}"
        return self.prompt + self.tokenizer.decode(tokens)

    def write(self, trainer: L.Trainer) -> None:
        """Also print the sample and write it to a file, on rank 0."""
        if trainer.is_global_zero:
            (self.run_dir / "sample.txt").write_text(self.sample, encoding="utf-8")
            print(f"\nsample.txt:\n{self.sample}")
        super().write(trainer)
