"""Continue a prompt with the model in a checkpoint of `train.py`, a file or a sharded folder.

python examples/gpt2/generate.py checkpoint=outputs/gpt2/.../checkpoints/last.ckpt prompt='class Data'
"""

from pathlib import Path

from hydra.utils import get_class
from model import LanguageModel
from omegaconf import DictConfig
from options import check_options
from tokenizer import load_tokenizer

from lightning_zero import hydra_main, load_from_checkpoint
from lightning_zero.config import ConfigError
from lightning_zero.tools.contents import read_checkpoint


@hydra_main(config_name="generate", config_path="conf")
def main(cfg: DictConfig) -> None:
    """Print the prompt and its continuation."""
    check_options(cfg, "checkpoint", "prompt", "length", "temperature", "top_k", "seed")
    path = Path(cfg.checkpoint).expanduser()
    parameters = hyperparameters(path)
    tokenizer = load_tokenizer(parameters["tokenizer"], cfg.vocab)
    model: LanguageModel = load_from_checkpoint(get_class(parameters["target"]), path)
    tokens = (
        model.to(cfg.device)
        .eval()
        .generate(
            tokenizer.encode(cfg.prompt.encode()).tolist(),
            cfg.length,
            temperature=cfg.temperature,
            top_k=cfg.top_k,
            vocab_size=tokenizer.vocab_size,
            seed=cfg.seed,
        )
    )
    print(cfg.prompt + tokenizer.decode(tokens))


def hyperparameters(path: Path) -> dict:
    """The hyperparameters of the model in a checkpoint; nothing else is read."""
    parameters = read_checkpoint(path)[0].get("hyper_parameters", {})
    if not {"target", "tokenizer"} <= parameters.keys():
        raise ConfigError(f"checkpoint={path} does not name a model and a tokenizer: expected one of train.py.")
    return parameters


if __name__ == "__main__":
    main()
