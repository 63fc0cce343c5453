"""Loading: what a model says of itself, and clear words for every checkpoint that cannot be used."""

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from slipstream.engine import load_model
from slipstream.engine.attention import IMPLEMENTATION
from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.forward import Decoder
from slipstream.engine.loading import _check_attention
from slipstream.errors import ModelNotUsable
from slipstream.sampling.params import SamplingDefaults
from tests.engine.conftest import Pair, load_pair, random_frames
from tests.engine.test_engine import greedy
from tests.support import hub_forms
from tests.support.tiny_checkpoint import TOKENS_PER_FRAME, write_tiny_llava

GENERATION = "generation_config.json"


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def remove_weights(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def truncate_weights(path: Path) -> None:
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])


def drop_one_weight(path: Path) -> None:
    weights = load_file(path / "model.safetensors")
    save_file(dict(list(weights.items())[1:]), path / "model.safetensors", metadata={"format": "pt"})


def know_fewer_tokens(path: Path) -> None:
    """As where some were added to the tokenizer alone."""
    config = json.loads((path / "config.json").read_text())
    edit_json(path / "config.json", text_config=config["text_config"] | {"vocab_size": 300})


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda path: (path / "config.json").unlink(), "no config.json"),
    "config is no JSON": (lambda path: (path / "config.json").write_text("{"), "not valid JSON"),
    "config is a list": (lambda path: (path / "config.json").write_text("[]"), "JSON object"),
    "no model type": (lambda path: edit_json(path / "config.json", model_type=None), "no model_type"),
    "unknown architecture": (
        lambda path: edit_json(path / "config.json", model_type="perceptron"),
        "'perceptron'; known: .*llava_onevision, .*qwen2_5_vl",
    ),
    "unknown surface": (
        lambda path: edit_json(path / "config.json", slipstream_surface="latex"),
        "slipstream_surface 'latex'; known: markdown",
    ),
    "no surface": (lambda path: edit_json(path / "config.json", slipstream_surface=["lines"]), "known: markdown"),
    "absurd config": (lambda path: edit_json(path / "config.json", text_config=7), "cannot be loaded"),
    "pickled weights": (remove_weights, "safetensors"),
    "truncated weights": (truncate_weights, "cannot be loaded"),
    "missing weight": (drop_one_weight, "1 weights are missing"),
    "tokens without embeddings": (know_fewer_tokens, "tokens up to 314, and the model knows those below 300"),
    "a prompt's token without an embedding": (
        lambda path: hub_forms.cut_vocabulary(path, 319),
        "prompts have token 319, and the model knows those below 319",
    ),
    "adapter": (lambda path: (path / "adapter_config.json").write_text("{}"), "merge it into its model"),
    "damaged ends of text": (
        lambda path: (path / GENERATION).write_text('{"eos_token_id": '),
        GENERATION,
    ),
    "words as ends of text": (lambda path: edit_json(path / GENERATION, eos_token_id="</s>"), "not '</s>'"),
    "half a number as end of text": (lambda path: edit_json(path / GENERATION, eos_token_id=3.0), "not 3.0"),
    "an end of text that is none": (lambda path: edit_json(path / GENERATION, eos_token_id=[None, 3]), "None, 3"),
    "a word as temperature": (
        lambda path: edit_json(path / GENERATION, do_sample=True, temperature="hot"),
        "generation_config.json: temperature must be a finite number, not 'hot'",
    ),
    "tokens below none": (
        lambda path: edit_json(path / GENERATION, do_sample=True, top_k=-1),
        "generation_config.json: top_k must be between 0",
    ),
    "a penalty in words": (lambda path: edit_json(path / GENERATION, repetition_penalty="1.1"), "not '1.1'"),
    "no tokenizer": (lambda path: (path / "tokenizer.json").unlink(), "cannot be loaded"),
    "weights and configuration alone": (
        lambda path: [file.unlink() for file in path.iterdir() if file.name.startswith("tokenizer")],
        "has no tokenizer.json; where a model is trained its processor must be saved",
    ),
    "no template": (lambda path: (path / "chat_template.jinja").unlink(), "chat template"),
    "template without video": (
        lambda path: (path / "chat_template.jinja").write_text("{{ messages[0]['content'][1]['text'] }}"),
        "one video before",
    ),
    "nonsense in the processor's config": (
        lambda path: edit_json(path / "video_preprocessor_config.json", size={"height": "tall", "width": 32}),
        "cannot be loaded",
    ),
    "frames of another size": (
        lambda path: edit_json(path / "video_preprocessor_config.json", size={"height": 64, "width": 64}),
        "32x32, not the 64x64",
    ),
    "sliding window": (
        lambda path: edit_json(
            path / "config.json",
            text_config=json.loads((path / "config.json").read_text())["text_config"]
            | {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention"] * 3},
        ),
        "only full attention",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_with_a_reason(pair: Pair, tmp_path: Path, damage: str) -> None:
    path = shutil.copytree(pair.path, tmp_path / "damaged")
    do_damage, reason = DAMAGES[damage]
    do_damage(path)
    with pytest.raises(ModelNotUsable, match=reason):
        load_model(str(path))


@pytest.mark.parametrize("ref", ["", "./nowhere", "/no/such/model", "models/that/are/missing", "~/nowhere", "one-word"])
def test_a_missing_path_never_asks_the_network(ref: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.engine.checkpoint.snapshot_download", None)
    with pytest.raises(ModelNotUsable, match="no such directory"):
        load_model(ref)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "weights.gguf").touch()
    with pytest.raises(ModelNotUsable, match="not a file"):
        load_model(str(tmp_path / "weights.gguf"))


def test_a_hub_id_out_of_reach_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(ref: str, **_: object) -> str:
        raise ConnectionError(ref)

    monkeypatch.setattr("slipstream.engine.checkpoint.snapshot_download", offline)
    with pytest.raises(ModelNotUsable, match="HF_HUB_OFFLINE"):
        load_model("some-owner/some-model")


def test_a_cached_hub_model_is_used_without_network(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def cached(ref: str, *, local_files_only: bool = False, **_: object) -> str:
        assert local_files_only
        return str(pair.path)

    monkeypatch.setattr("slipstream.engine.checkpoint.snapshot_download", cached)
    assert load_model("some-owner/some-model").info.model_id == "some-owner/some-model"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "int4"}, "float32, bfloat16, float16"),
        ({"device": "cuda:99"}, "not usable here"),
        ({"device": "abacus"}, "not usable here"),
        ({"attention": "linear"}, "auto, matmul, sdpa, flash"),
        ({"attention": "flash"}, "flash-attn"),
    ],
)
def test_impossible_options_are_refused(pair: Pair, options: dict[str, str], reason: str) -> None:
    with pytest.raises(ModelNotUsable, match=reason):
        load_model(str(pair.path), **options)


def test_info_describes_the_model(pair: Pair) -> None:
    info = pair.ours.info
    text = pair.theirs.config.get_text_config()
    assert info.model_id == str(pair.path)
    assert (info.model_type, info.dtype, info.device) == ("llava_onevision", "float32", "cpu")
    assert (info.vocab_size, info.hidden_size, info.num_layers) == (320, text.hidden_size, text.num_hidden_layers)
    assert info.tokens_per_frame == TOKENS_PER_FRAME
    assert info.max_context == 512


def test_a_checkpoint_may_name_how_it_writes(tmp_path: Path, pair: Pair) -> None:
    """What its family writes else; of this one nothing is known. `transformers` does not mind."""
    path = write_tiny_llava(tmp_path / "named", seed=3)
    edit_json(path / "config.json", slipstream_surface="lines")
    assert load_model(str(path)).info.surface == "lines" and pair.ours.info.surface == ""
    assert AutoModelForImageTextToText.from_pretrained(path).config.slipstream_surface == "lines"


def test_the_digest_tells_tokenizers_apart_but_not_models(tmp_path: Path, pair: Pair) -> None:
    same = load_model(str(write_tiny_llava(tmp_path / "same", seed=99, layers=1, hidden=16)))
    other = load_model(str(write_tiny_llava(tmp_path / "other", seed=7, vocab=300)))
    assert same.info.tokenizer_digest == pair.ours.info.tokenizer_digest != other.info.tokenizer_digest


@pytest.mark.parametrize(
    ("generation", "text", "expected"),
    [
        ({"eos_token_id": [5, 6]}, 7, (5, 6)),
        ({"eos_token_id": 5}, 7, (5,)),
        ({}, 7, (7,)),
        ({}, None, (317,)),
        ({"eos_token_id": -1}, 7, ()),
        ({"eos_token_id": [2**40, 6]}, 7, (6,)),
    ],
)
def test_end_tokens_come_from_the_nearest_source(
    pair: Pair, tmp_path: Path, generation: dict[str, Any], text: int | None, expected: tuple[int, ...]
) -> None:
    path = shutil.copytree(pair.path, tmp_path / "copy")
    text_config = json.loads((path / "config.json").read_text())["text_config"] | {"eos_token_id": text}
    edit_json(path / "config.json", text_config=text_config)
    (path / GENERATION).write_text(json.dumps(generation))
    assert load_model(str(path)).info.eos_token_ids == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"processor_config.json": {"video_processor": {"a": 1}}, "video_preprocessor_config.json": {"a": 2}}, 1),
        ({"processor_config.json": {}, "video_preprocessor_config.json": {"a": 2}}, 2),
        ({"video_preprocessor_config.json": {"a": 2}, "preprocessor_config.json": {"a": 3}}, 2),
        ({"preprocessor_config.json": {"a": 3}}, 3),
    ],
)
def test_video_processor_settings_are_found_where_transformers_looks(
    tmp_path: Path, files: dict[str, Any], expected: int
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert Checkpoint("ref", tmp_path, {}).video_processor_config().get("a") == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"preprocessor_config.json": {"a": 1}, "processor_config.json": {"image_processor": {"a": 2}}}, 2),
        ({"preprocessor_config.json": {"a": 1}, "processor_config.json": {"video_processor": {"a": 2}}}, 1),
        ({"preprocessor_config.json": {"a": 1}, "video_preprocessor_config.json": {"a": 2}}, 1),
    ],
)
def test_image_processor_settings_are_found_where_transformers_looks(
    tmp_path: Path, files: dict[str, Any], expected: int
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert Checkpoint("ref", tmp_path, {}).image_processor_config().get("a") == expected


def test_without_settings_no_usual_ones_are_taken(tmp_path: Path) -> None:
    """Of Qwen3-VL they are of 32 times fewer pixels than those that are published."""
    (tmp_path / "processor_config.json").write_text("{}")
    with pytest.raises(ModelNotUsable, match="says nothing of how frames become its input; video_preprocessor_config"):
        Checkpoint("ref", tmp_path, {}).video_processor_config()
    (tmp_path / "video_preprocessor_config.json").write_text("{}")
    with pytest.raises(ModelNotUsable, match="says nothing of how frames become its input; preprocessor_config"):
        Checkpoint("ref", tmp_path, {}).image_processor_config()


def test_the_processors_template_goes_before_the_tokenizers(tmp_path: Path) -> None:
    """In the order of `ProcessorMixin.get_processor_dict`."""
    checkpoint = Checkpoint("ref", tmp_path, {})
    assert checkpoint.chat_template() is None
    (tmp_path / "chat_template.jinja").write_text("three")
    assert checkpoint.chat_template() == "three"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "two"}')
    assert checkpoint.chat_template() == "two"
    (tmp_path / "processor_config.json").write_text('{"chat_template": "one"}')
    assert checkpoint.chat_template() == "one"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_weights_that_are_codes_are_refused_whatever_the_configuration_says(tmp_path: Path, dtype: torch.dtype) -> None:
    """Upstream would take a code for the number that it stands for, and the text would be nonsense."""
    folder = write_tiny_llava(tmp_path / "model", seed=1)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("down_proj.weight"))
    save_file(tensors | {name: tensors[name].to(dtype)}, file, {"format": "pt"})
    with pytest.raises(ModelNotUsable, match=r"its weights are quantised \([FIU]8"):
        load_model(str(folder))


def test_a_text_model_that_took_another_attention_is_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prefill would be right, and every window would silently forget what was before it."""
    load = AutoModelForImageTextToText.from_pretrained

    def load_with_sdpa(*args: Any, **options: Any) -> Any:
        return load(*args, **options | {"attn_implementation": "sdpa"})

    monkeypatch.setattr(AutoModelForImageTextToText, "from_pretrained", load_with_sdpa)
    with pytest.raises(ModelNotUsable, match="took attention 'sdpa', not ours"):
        load_model(str(pair.path))


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, "not full_attention, sliding_attention"),
        ({"layer_types": None, "sliding_window": 4096}, "not sliding_attention"),
        ({"sliding_window": 32768}, ""),
        ({"sliding_window": None}, ""),
        ({"layer_types": ["full_attention"], "sliding_window": 4096}, ""),
    ],
)
def test_a_text_model_without_full_attention_in_every_layer_is_refused(
    pair: Pair, settings: dict[str, Any], refused: str
) -> None:
    config = SimpleNamespace(_attn_implementation=IMPLEMENTATION, max_position_embeddings=32768, **settings)
    expected = pytest.raises(ModelNotUsable, match=refused) if refused else contextlib.nullcontext()
    with expected:
        _check_attention(Checkpoint("ref", pair.path, {}), cast(Decoder, SimpleNamespace(config=config)), 0)


@pytest.mark.parametrize(
    ("changes", "defaults"),
    [
        ({}, SamplingDefaults()),
        ({"repetition_penalty": 1.05}, SamplingDefaults(repetition_penalty=1.05)),
        ({"temperature": 0.7, "top_k": 20}, SamplingDefaults()),
        ({"do_sample": True}, SamplingDefaults(1.0, 50)),
        ({"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20}, SamplingDefaults(0.7, 20, 0.8)),
        ({"do_sample": True, "min_p": 0.1}, SamplingDefaults(1.0, 50, min_p=0.1)),
    ],
)
def test_what_a_checkpoint_says_of_sampling(
    pair: Pair, tmp_path: Path, changes: dict[str, Any], defaults: SamplingDefaults
) -> None:
    path = shutil.copytree(pair.path, tmp_path / "model")
    edit_json(path / GENERATION, **changes)
    assert load_model(str(path)).info.sampling_defaults == defaults


def test_positions_ask_no_device_how_long_a_text_is(tmp_path: Path) -> None:
    """Frequencies that grow with the text do so behind the context, where nothing is served."""
    path = write_tiny_llava(tmp_path, seed=7)
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["rope_parameters"] |= {"rope_type": "dynamic", "factor": 2.0}
    (path / "config.json").write_text(json.dumps(config))
    pair, frames = load_pair(path), random_frames(3, 1)
    theirs: Any = pair.theirs.model.language_model.rotary_emb
    ours: Any = pair.ours.runner.decoder.rotary_emb
    assert (theirs.rope_type, ours.rope_type) == ("dynamic", "default")
    _, state, logits = pair.prefill("What happens?", frames)
    assert greedy(pair.ours, state, logits, 40) == pair.generate("What happens?", frames, 40)


def test_positions_that_are_scaled_linearly_reach_further(tmp_path: Path) -> None:
    """As LLaVA-NeXT-Video's do: 4,096 of them, with a factor of 2.5, are a context of 10,240."""
    path = write_tiny_llava(tmp_path, seed=7)
    hub_forms.edit(
        path / "config.json",
        lambda config: config["text_config"]["rope_parameters"].update(rope_type="linear", factor=1.5),
    )
    pair, frames = load_pair(path), random_frames(140, 1)
    assert pair.ours.info.max_context == 768 and pair.ours.info.max_frames > 140
    _, state, logits = pair.prefill("What happens?", frames)
    assert greedy(pair.ours, state, logits, 8) == pair.generate("What happens?", frames, 8)
