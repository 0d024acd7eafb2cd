"""What the heads of a model are measured on: prompts, and a text or the data of its run."""

import itertools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from clearhead.config.schema import DataConfig, LensSettings
from clearhead.errors import ClearheadError, Problem, refuse
from headlens import LensConfig
from scripts.inspection.settings import InspectConfig

if TYPE_CHECKING:
    from clearhead.models.foreign import ForeignModel
    from clearhead.models.pretrained import PretrainedModel
    from clearhead.tokens.windows import WindowDataset
    from data import LoadedData
    from headlens import Lens

    Model = PretrainedModel | ForeignModel

TEXT_BYTES = 2**20  # of the text on which heads of other models than ours are measured


def load_data(trained: "Model", settings: InspectConfig) -> "LoadedData | None":
    """Returns the data on which heads are measured and removed: of data.path, or of the run. None
    for a model of transformers, see text_of. Raises DataError or ConfigError."""
    from clearhead.models.pretrained import PretrainedModel
    from data import load_datasets

    if not isinstance(trained, PretrainedModel):
        if settings.ablation:
            reason = "heads of this architecture cannot be removed"
            refuse([Problem("ablation", settings.ablation, reason, "use a GPT-2, or no ablation")])
        return None
    changes = {}
    if path := settings.data.path:
        changes = {"path": path, "synthetic": None, "val_path": None, "val_fraction": 0.0}
        changes["weights"] = None
    elif not trained.state:
        if settings.ablation:
            reason = "a model without a run needs a text for ablation"
            refuse([Problem("data.path", None, reason, "set data.path=FILE")])
        return None
    try:
        return load_datasets(data_config(trained, **changes), trained.tokenizer)
    except ClearheadError:
        if settings.data.path or settings.ablation:
            raise
        print("heads are measured on the prompts, as the data of the run cannot be read")
        return None


def data_config(trained: "PretrainedModel", **changes: object) -> DataConfig:
    """Returns the data settings of a run, or default settings. Raises ConfigError."""
    values = dict(trained.state.settings["data"]) if trained.state else {}
    values |= changes | {"max_length": trained.window}
    return DataConfig.with_defaults(**values)


def text_of(path: str | list[str]) -> str:
    """Returns the beginning of the texts of data.path. Raises DataError."""
    from clearhead.tokens.paths import find_files
    from clearhead.tokens.readers import documents, split_file

    parts = (part for file in find_files(path) for part in split_file(file, TEXT_BYTES))
    read = bytearray()
    texts = (itertools.chain(text, [b"\n"]) for part in parts for text in documents(part))
    for block in itertools.chain.from_iterable(texts):
        read += block
        if len(read) >= TEXT_BYTES:
            break
    return bytes(read[:TEXT_BYTES]).decode("utf-8", "ignore")


def prompts_of(
    trained: "Model", settings: InspectConfig, loaded: "LoadedData | None"
) -> tuple[LensConfig, Sequence[int] | None, Any]:
    """Returns the prompts: of text=, of the run, or passages of the data; the tokens of which the
    repeated sequence consists, the frequent ones of the data; and their tokenizer."""
    stored = dict(trained.state.settings.get("lens", {})) if trained.state else {}
    keys = ("prompts", "max_tokens", "repeat_length")
    known = {key: stored[key] for key in keys if key in stored}
    config = LensConfig(**LensSettings.with_defaults(**known).model_dump())
    config.prompts = settings.texts or config.prompts
    config.logit_lens = settings.logit_lens
    for key in keys[1:]:
        if (value := getattr(settings, key)) is not None:
            setattr(config, key, value)
    if loaded and config.prompts is None:
        from clearhead.run.prompts import choose_prompts

        most = min(config.max_tokens, trained.window)
        chosen = choose_prompts(loaded.val or loaded.train, trained.tokenizer, most)
        config.prompts = chosen["lens.prompts"]
    vocabulary = all_ids(trained)
    if loaded and trained.state:
        vocabulary = loaded.train.common_tokens().tolist()
    return config, vocabulary, trained.tokenizer


def all_ids(trained: "Model") -> Sequence[int] | None:
    """Returns all token ids; None lets the lens choose them."""
    return range(trained.tokenizer.n_vocab) if hasattr(trained.tokenizer, "n_vocab") else None


def lens_of(
    trained: "Model",
    settings: InspectConfig,
    loaded: "LoadedData | None",
    settled: tuple[LensConfig, Sequence[int] | None, Any],
) -> tuple["Lens", "WindowDataset | None"]:
    """Returns the lens of a model, and the windows on which heads are removed."""
    from clearhead.run.lens_runner import MAX_TOKENS, MAX_WINDOWS, some_windows, text_name
    from headlens import Lens

    config, vocabulary, tokenizer = settled
    if getattr(trained.tokenizer, "name", None) != getattr(tokenizer, "name", None):
        vocabulary = all_ids(trained)
    dataset, text = loaded and (loaded.val or loaded.train), None
    if dataset:
        text = some_windows(dataset, MAX_WINDOWS, MAX_TOKENS)
    elif settings.data.path:
        text = text_of(settings.data.path)
    try:
        lens = Lens(
            trained.tokenizer,
            config,
            context_length=trained.window,
            text=text,
            text_name=text_name(is_synthetic(trained, settings)),
            vocabulary=vocabulary,
        )
    except ValueError as error:  # the text is too short
        refuse([Problem("data.path", settings.data.path, str(error), "give a longer text")])
    return lens, dataset


def is_synthetic(trained: "Model", settings: InspectConfig) -> bool:
    """Returns whether heads are measured on generated sequences instead of a text."""
    if settings.data.path or not trained.state:
        return False
    return bool(trained.state.settings["data"].get("synthetic"))


def check_prompts(settings: InspectConfig, lens: "Lens") -> None:
    """Raises ConfigError without a prompt. Prints which texts are truncated."""
    if not lens.prompts:
        hint = "give a text, or no repeat_length"
        refuse([Problem("text", "", "no prompt is left", hint)])
    for prompt in lens.prompts[: len(settings.texts)]:
        if prompt.truncated:
            shown = f"only its first {len(prompt.token_ids)} tokens are used"
            print(f"text: {shown} (max_tokens=, training window)", file=sys.stderr)
