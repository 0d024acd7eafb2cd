"""Tiny random builds of the decoders of transformers: three layers, width 32, 97 tokens."""

import contextlib
import functools
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headlens import Captured, capture, score_parts
from headlens.ablation import edited_contexts, removal
from headlens.capturing import output_projections
from headlens.observing import observe
from helpers import REPOSITORY

L, H, G, D = 3, 4, 2, 8  # layers, heads, heads of keys and values, head_dim
SIZES = {  # value: the names that it has in the configs; a build gets those that its config has
    97: "vocab_size decoder_vocab_size",
    32: "hidden_size d_model n_embd emb_dim embedding_size embedding_dim dim_model lru_width",
    3: "num_hidden_layers num_layers n_layer n_layers decoder_layers num_decoder_layers",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads attention_heads "
    "num_decoder_attention_heads swa_num_attention_heads encoder_attention_heads "
    "linear_num_heads linear_num_value_heads mamba_n_heads mamba_num_heads num_experts "
    "num_local_experts n_routed_experts moe_num_experts qk_rope_head_dim rotary_dim mamba_dt_rank "
    "patch_size index_n_heads index_topk",
    2: "num_key_value_heads swa_num_key_value_heads num_experts_per_tok num_experts_per_token "
    "moe_topk moe_k top_k_experts linear_num_key_heads",
    8: "head_dim kv_channels swa_head_dim d_head dim_head qk_nope_head_dim v_head_dim kv_lora_rank "
    "linear_head_dim linear_key_head_dim linear_value_head_dim mamba_d_state ssm_state_size "
    "chunk_size mamba_chunk_size index_head_dim image_size",
    48: "intermediate_size ffn_dim decoder_ffn_dim d_inner dim_ff ffn_hidden_size n_inner "
    "intermediate_size_mlp dense_intermediate_size encoder_ffn_dim",
    16: "moe_intermediate_size shared_intermediate_size expert_ffn_hidden_size mamba_d_head "
    "shared_expert_intermediate_size moe_shared_expert_intermediate_size mamba_head_dim "
    "patch_hidden_size",
    64: "max_position_embeddings n_positions n_ctx context_length max_seq_len model_max_length "
    "max_target_positions mamba_d_ssm",
    12: "q_lora_rank",
    5: "sliding_window attention_window window_size sliding_window_size attention_window_size "
    "attention_chunk_size",
    1: "n_group topk_group num_expert_group first_k_dense_replace num_dense_layers pad_token_id "
    "mamba_n_groups n_groups encoder_layers num_encoder_layers",
    0: "bos_token_id eos_token_id",
}
SIZES = {name: value for value, names in SIZES.items() for name in names.split()}


FULL, LINEAR, SLIDING = "full_attention", "linear_attention", "sliding_attention"
MIXED = {"layer_types": [LINEAR, FULL, LINEAR]}  # a hybrid
SLIDES = {"layer_types": [SLIDING, FULL, SLIDING]}
ALL_HEADS = {"num_key_value_heads": H}
MLA = ALL_HEADS | {"head_dim": 4}  # latent attention: of the rotated part
DECODER = {"is_decoder": True}


def rope(kind, **values):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0} | values}


# Types that need only the sizes above.
PLAIN = """
afmoe apertus arcee aria_text bart biogpt bitnet blenderbot blenderbot-small bloom codegen cohere
cohere2 cohere2_moe cpmant ctrl diffllama doge ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo
gemma gemma2 glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox gpt_neox_japanese gptj granite granitemoe
granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hyperclovax jais2 jetmoe laguna llama marian
mbart minimax_m2 ministral ministral3 mistral mixtral mpt mvp nanochat nemotron olmo olmo2 olmo3
olmoe openai-gpt opt pegasus persimmon phi phi3 phimoe plbart qwen2 qwen2_moe qwen3 qwen3_moe
seed_oss smollm3 solar_open stablelm starcoder2 trocr vaultgemma whisper xglm mamba falcon_mamba
rwkv bert beam flint hy_v3 kolibri1 mellum mimo_v2_flash granite_swa granitemoe_swa
"""
BUILDS = {name: {} for name in PLAIN.split()} | {
    "llama with one head of keys": {"num_key_value_heads": 1},
    "llama with dynamic NTK rope": rope("dynamic", factor=2.0) | {"max_position_embeddings": 8},
    "llama with yarn": rope("yarn", factor=4.0, original_max_position_embeddings=8),
    "phi3 with longrope": rope(
        "longrope",
        short_factor=[1.0] * 2 * G,
        long_factor=[3.0] * 2 * G,
        original_max_position_embeddings=8,
        factor=8.0,
    ),
    "llama with llama3 rope": rope(
        "llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8,
    ),
    "llama with linear rope": rope("linear", factor=2.0),
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "qwen2 with windows": {"use_sliding_window": True, "max_window_layers": 1},
    "mistral without a window": {"sliding_window": None},
    "gpt2 scaled by layer": {"scale_attn_by_inverse_layer_idx": True},
    "gpt2 upcast": {"reorder_and_upcast_attn": True},
    "gpt2 unscaled": {"scale_attn_weights": False},
    "gpt_bigcode with all heads": {"multi_query": False},
    "gpt_neox sequential": {"use_parallel_residual": False},
    "gpt_oss": rope("default") | SLIDES,
    "gpt_oss with yarn": rope("yarn", factor=4.0, original_max_position_embeddings=8),
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]], "num_layers": L},
    "falcon": {},
    "falcon with ALiBi": {"alibi": True},
    "falcon with groups": {"new_decoder_architecture": True, "num_kv_heads": G},
    "falcon sequential": {"parallel_attn": False, "multi_query": False},
    "mpt without ALiBi": {"attn_config": {"alibi": False}},
    "mpt clipped": {"attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.3}},
    "opt with norms behind": {"do_layer_norm_before": False},
    "phi with norms of queries": {"qk_layernorm": True},
    "stablelm parallel": {"use_parallel_residual": True, "qk_layernorm": True},
    "cohere with norms of queries": {"use_qk_norm": True},
    "olmo clipped": {"clip_qkv": 0.5},
    "dbrx": {"attn_config": {"clip_qkv": 0.5, "kv_n_heads": G, "rope_theta": 10000.0}},
    "mamba2": {"head_dim": 16},
    "granite with multipliers": {
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.5,
        "embedding_multiplier": 3.0,
    },
    "gemma2 with small caps": {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "gemma3_text": SLIDES,
    "gemma3_text bidirectional": {"use_bidirectional_attention": True},
    "llama4_text": rope("default")
    | {"layer_types": ["chunked_attention", FULL, "chunked_attention"]},
    "bert as decoder": DECODER,
    "bert-generation as decoder": DECODER,
    "camembert as decoder": DECODER,
    "data2vec-text as decoder": DECODER,
    "electra as decoder": DECODER,
    "ernie as decoder": DECODER,
    "megatron-bert as decoder": DECODER,
    "rembert as decoder": DECODER | {"input_embedding_size": 32},
    "roberta as decoder": DECODER,
    "roberta-prelayernorm as decoder": DECODER,
    "roformer as decoder": DECODER,
    "xlm-roberta as decoder": DECODER,
    "xlm-roberta-xl as decoder": DECODER,
    "xmod as decoder": DECODER | {"default_language": "en_XX"},
    "big_bird as decoder": DECODER | {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "xlnet": {"n_head": H},
    "xlm causal": {"causal": True},
    "reformer": DECODER | {"axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 16]},
    "prophetnet": {},
    "deepseek_v2": MLA,
    "deepseek_v3": MLA,
    "deepseek_v32": MLA,
    "minicpm3": MLA,
    "youtu": MLA,
    "longcat_flash": MLA,
    "glm4_moe_lite": MLA,
    "glm_moe_dsa": MLA,
    "axk1": MLA,
    "hy_v4": MLA,
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "modernbert-decoder": {"local_attention": 4},
    "qwen3_next": MIXED,
    "qwen3_5_text": MIXED,
    "qwen3_5_moe_text": MIXED,
    "lfm2": {"layer_types": ["conv", FULL, "conv"]},
    "lfm2_moe": {"layer_types": ["conv", FULL, "conv"]},
    "lfm3": {"layer_types": ["conv", FULL, SLIDING]},
    "granitemoehybrid": MIXED,
    "falcon_h1": {},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1]},
    "zamba": ALL_HEADS | {"layers_block_type": [LINEAR, "hybrid", "hybrid"]},
    "zamba2": ALL_HEADS | {"layers_block_type": [LINEAR, "hybrid", LINEAR]},
    "nemotron_h": {"layers_block_type": [LINEAR, FULL, "mlp"]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention", "attention"]},
    "minimax": MIXED,
    "olmo_hybrid": MIXED,
    "kimi_linear": MLA | MIXED,
    "bailing_hybrid": MLA | {"layer_group_size": 2},
    "lara_mini": MIXED,
    "gemma3n_text": {"layer_types": [SLIDING, FULL, SLIDING, FULL], "num_hidden_layers": 4}
    | {"num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0] * 4}
    | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97, "laurel_rank": 4},
    "gemma4_text": {"layer_types": [SLIDING, FULL, SLIDING, FULL], "num_hidden_layers": 4}
    | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97}
    | {"num_kv_shared_layers": 2, "global_head_dim": D},
    "gemma3": {"text_config": SLIDES},
    "qwen3_5": {"text_config": MIXED},
    "llama4": {},
    "mllama": {},
    "moshi": {},
    "git": {},
    "fuyu": {},
    "emu3": {},
    "zaya": {"num_experts_per_tok": 1},
    "xlstm": {},
}


# What capture refuses, by reason; all others must be exact.
REFUSED = {
    "they attend to tokens that follow": (
        *("bert", "cpmant", "gemma3_text bidirectional", "xlnet"),
    ),
    "they have no attention weights": ("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"),
    "each head attends with the difference of two maps": ("diffllama",),
    "tokens are sorted into chunks, and only their chunks attend to each other": ("reformer",),
}
# The numbers of the layers with attention of hybrids; all others have it in each layer.
HYBRIDS = """
bailing_hybrid bamba granitemoehybrid jamba kimi_linear lara_mini lfm2 lfm2_moe minimax nemotron_h
olmo_hybrid qwen3_5 qwen3_5_moe_text qwen3_5_text qwen3_next zamba2
"""
NUMBERS = {name: [1] for name in HYBRIDS.split()}
NUMBERS |= {name: [1, 2] for name in ("lfm3", "recurrent_gemma", "zamba")}
# One build of each kind, for `make test`.
SOME = """
llama, gpt2, bloom, gpt_oss, llama4_text, gemma3_text, deepseek_v3, deepseek_v32, qwen3_5_text,
zamba2, gemma3n_text, afmoe, whisper, diffllama, bert, falcon with ALiBi,
llama with dynamic NTK rope
"""
SOME = [name.strip() for name in SOME.split(",")]
# Small decoders that many people download, and the build of their type.
POPULAR = {
    "bloom-560m": "bloom",
    "distilgpt2": "gpt2",
    "Falcon-H1-0.5B": "falcon_h1",
    "gemma-2-2b": "gemma2",
    "gemma-3-270m": "gemma3_text",
    "gemma-3n-E2B": "gemma3n_text",
    "gemma-4-E2B": "gemma4_text",
    "GPT-2": "gpt2",
    "gpt-neo-125m": "gpt_neo",
    "granite-4.0-h-350m": "granitemoehybrid",
    "granite-3.3-2b": "granite",
    "LFM2-350M": "lfm2",
    "Llama-3.2-1B": "llama with llama3 rope",
    "mamba-130m": "mamba",
    "MiniCPM3-4B": "minicpm3",
    "Ministral-3-3B": "ministral3",
    "Nemotron-H-4B": "nemotron_h",
    "OLMo-2-1B": "olmo2",
    "opt-125m": "opt",
    "phi-2": "phi",
    "Phi-3-mini": "phi3 with longrope",
    "pythia-160m": "gpt_neox",
    "Qwen2.5-0.5B": "qwen2",
    "Qwen3-0.6B": "qwen3",
    "Qwen3.5-0.8B": "qwen3_5",
    "SmolLM2-135M": "llama",
    "SmolLM3-3B": "smollm3",
    "stablelm-2-1_6b": "stablelm",
    "TinyLlama-1.1B": "llama",
    "Zamba2-1.2B": "zamba2",
}


def config_of(build):
    """Returns the config of a build: of its type, the first word, with the sizes above and its
    changes."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return _config(CONFIG_MAPPING[build.split()[0]], BUILDS[build])


def _config(config_class, changes):
    default = config_class()
    values = {name: value for name, value in SIZES.items() if name in default.to_dict()}
    parts = [name for name in config_class.sub_configs if getattr(default, name) is not None]
    of_parts = {
        name: _config(type(getattr(default, name)), changes.get(name, {})).to_dict()
        for name in parts
    }
    return config_class(**values | changes | of_parts)


def model_of(build, attention=None, dtype=torch.float32):
    """Returns the model of a build, in eval mode, with random weights such that its attention is
    not uniform. attention: its attention implementation, by default that of transformers."""
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    torch.manual_seed(0)
    options = {"attn_implementation": attention} if attention else {}
    model = AutoModelForCausalLM.from_config(config_of(build), **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3)
    return model.to(dtype).eval()


IDS = torch.randint(2, 97, (2, 12), generator=torch.Generator().manual_seed(1))


@dataclass
class Judged:
    """What capture gives of a build, and what it should be."""

    model: str  # its class
    refused: str = ""  # the message
    captured: Captured | None = None
    logits: Tensor | None = None  # of the model's own pass
    # Weights of each layer that it calls with scaled_dot_product_attention in its own pass, by the
    # formula in float64, and those that it returns with eager attention. Empty: none.
    by_formula: list[Tensor] = field(default_factory=list)
    of_eager: list[Tensor] = field(default_factory=list)
    eager_logits: Tensor | None = None
    changed: list[str] = field(default_factory=list)  # by capture


@functools.cache
def judged(build):
    """Captures a build, and runs two other models with the same weights: with the attention that is
    the default of transformers, and with eager attention."""
    model, options = model_of(build), {"attention_mask": torch.ones_like(IDS), "use_cache": False}
    result, before = Judged(type(model).__name__), _state(model)
    try:
        result.captured = capture(model, IDS)
    except (ValueError, TypeError) as error:
        result.refused = str(error)
    after = _state(model)
    result.changed = [name for name in before | after if before.get(name) != after.get(name)]
    with torch.no_grad():
        with _formula(result.by_formula):
            result.logits = model_of(build)(IDS, **options).logits
        eager = model_of(build, "eager")(IDS, output_attentions=True, **options)
    result.eager_logits = eager.logits
    result.of_eager = [w for w in getattr(eager, "attentions", None) or () if w is not None]
    return result


@contextlib.contextmanager
def _formula(found):
    """Appends the weights of each call of scaled_dot_product_attention: softmax(q k / sqrt(D))."""
    fused = F.scaled_dot_product_attention

    def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **options):
        keys = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = q.double() @ keys.mT * (scale or q.shape[-1] ** -0.5)
        mask = torch.ones_like(scores).tril().bool() if is_causal else attn_mask
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(scores).masked_fill(~mask, float("-inf"))
        found.append((scores if mask is None else scores + mask).softmax(-1).float())
        return fused(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, **options)

    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = fused


def _state(model):
    """Everything that a capture could change: {name: value}, where tensors are their bytes."""
    from transformers import AttentionInterface, AttentionMaskInterface

    state = {}
    for path, module in model.named_modules():
        inside = module._parameters | module._buffers
        for name, value in (vars(module) | inside).items():
            if isinstance(value, Tensor):
                state[f"{path}.{name}"] = value.detach().numpy().tobytes()
            elif name not in ("_modules", "_parameters", "_buffers"):
                state[f"{path}.{name}"] = str(value)
    for interface in (AttentionInterface(), AttentionMaskInterface()):
        state[type(interface).__name__] = str(dict(interface))
    return state


def check(build):
    """The maps of a build are those of its forward pass, or it is refused. Nothing changes."""
    found = judged(build)
    assert not found.changed
    assert "\n" not in found.refused
    if any(build in builds for builds in REFUSED.values()):
        assert found.refused
        return
    assert found.refused == ""
    layers = found.captured.layers
    assert [layer.number for layer in layers] == NUMBERS.get(build, [*range(len(layers))])
    assert not {layer.number for layer in layers} & {*found.captured.others}
    torch.testing.assert_close(found.captured.logits, found.logits, atol=1e-3, rtol=1e-3)
    references = [found.by_formula]
    if torch.allclose(found.eager_logits, found.logits, 1e-3, 1e-3):  # not Falcon's with ALiBi
        references.append(found.of_eager)
    references = [each for each in references if len(each) == len(layers)]
    assert references
    for number, layer in enumerate(layers):
        weights, hidden = layer.weights, ~torch.ones(IDS.shape[1], IDS.shape[1]).tril().bool()
        assert weights.dtype == torch.float32
        for reference in references:
            torch.testing.assert_close(weights, reference[number], atol=2e-5, rtol=1e-4)
        assert weights.var() > 1e-3  # it is not uniform
        assert (weights >= 0).all()
        assert (weights[..., hidden] == 0).all()
        assert (weights.sum(-1) < 1 + 1e-5).all()
        if layer.scores is not None:  # the rest of a row is that of the sink
            seen = layer.scores.isfinite()
            assert (weights[~seen] == 0).all()
            expected = layer.scores.softmax(-1) * weights.sum(-1, keepdim=True)
            torch.testing.assert_close(weights, expected, atol=1e-5, rtol=1e-3)
    removes_heads(build)
    has_parts(build)


@functools.cache
@torch.no_grad()
def removes_heads(build):
    """Returns whether heads of a build can be removed. If so, one head of each layer is replaced:
    by zero in what its attention returns, which makes zero what the hook sees of this head and of
    no other; and by a constant, with the hook and by hand, in weight and bias of the projection."""
    model = model_of(build)
    if not (projections := output_projections(model)):
        return False
    modules = list(dict.fromkeys(of.module for of in projections))  # of several layers, in some
    heads = [modules.index(of.module) % of.num_heads for of in projections]
    means, found, turns = [], [], iter(heads)

    def run():
        return model(IDS, attention_mask=torch.ones_like(IDS), use_cache=False).logits

    def keep(_, context):
        found.append((context == 0).all(3).all(2).all(0).nonzero().flatten().tolist())
        means.append(torch.linspace(-1, 1, context[0, :, 0].numel()).view_as(context[0, :, 0]))
        return context

    def remove(call):
        call.output[:, next(turns)] = 0

    with edited_contexts(projections, keep):
        observe(model, IDS, run, remove)
    assert found == [[head] for head in heads]
    before = run()
    with edited_contexts(projections, removal([*enumerate(heads)], means)):
        by_hook = run()
    by_module = {
        of.module: (head, mean[head])
        for of, head, mean in zip(projections, heads, means, strict=True)
    }
    for module, (head, mean) in by_module.items():
        linear = next(each for each in module.modules() if hasattr(each, "weight"))
        linear.weight = torch.nn.Parameter(linear.weight.clone())  # layers may share it
        weight = linear.weight if isinstance(linear, torch.nn.Linear) else linear.weight.T
        columns = weight[:, head * len(mean) : (head + 1) * len(mean)]
        bias = columns @ mean
        linear.bias = torch.nn.Parameter(bias if linear.bias is None else linear.bias + bias)
        columns.zero_()
    torch.testing.assert_close(by_hook, run(), atol=1e-3, rtol=1e-3)
    assert not torch.allclose(by_hook, before, 1e-2, 1e-2)
    return True


@functools.cache
def has_parts(build):
    """Returns whether each layer of a build has parts of scores. Those of one head are a sum."""
    model = model_of(build)
    for number, layer in enumerate(judged(build).captured.layers):
        head = number % layer.weights.shape[1]
        row = layer.scores[0, head, -1]
        key, mean = int(row.argmax()), float(row[row.isfinite()].mean())
        try:
            parts = score_parts(model, IDS[0], number, head, len(row) - 1, key)
        except ValueError:
            return False
        found, expected = (parts.score, parts.values.sum()), (row[key], row[key] - mean)
        np.testing.assert_allclose(found, expected, atol=1e-2, rtol=1e-3)
    return True


NO_YES = "no", "yes"
PAGE = REPOSITORY / "headlens/docs/families.md"
INTRODUCTION = """# Families of models

What the lens gives of the decoders of transformers: {builds} tiny random models of {types} types. \
The weights of each are compared with softmax(q k) in float64 and with those of its eager \
attention, its logits with its own pass, and everything else of it is the same after the capture. \
{exact} are exact, within rounding; the others are refused in one line. The code has no name of a \
type: what a model computes decides.

| column | yes |
|---|---|
| verified | by the proof at the first capture: with the model's own pass, and weights times \
values in each layer (W V) |
| layers | all, or those with attention; the others of a hybrid are named |
| value norms | each value is added to the residual stream times a constant, without a norm or a \
gate behind it |
| removal | of heads: the same as the edit by hand of weight and bias of the output projection |
| parts | of each score, their sum is the score: the attention receives the output of a norm, \
calls scaled_dot_product_attention without soft cap or position bias, and what it returns is added \
times a constant |

| families | maps | verified | layers | value norms | removal | parts |
|---|---|---|---|---|---|---|
"""
SMALL = """
## Small decoders

{exact} of these 30 are exact. They are our choice among families with many downloads: the hub's \
ranking of today was not at hand. Compared is a build of the same type with the same kind of \
attention, without the trained weights.

{names}.
"""


def page():
    """Returns headlens/docs/families.md."""
    groups = {}
    for build in BUILDS:
        groups.setdefault(_row(build), []).append(build)
    rows = sorted(groups.items(), key=lambda group: (group[0][0] != "exact", -len(group[1])))
    table = "".join(f"| {', '.join(builds)} | {' | '.join(row)} |\n" for row, builds in rows)
    exact = sum(len(builds) for row, builds in rows if row[0] == "exact")
    types = {build.split()[0] for build in BUILDS}
    start = INTRODUCTION.format(builds=len(BUILDS), types=len(types), exact=exact)
    of_popular = {name: _row(build)[0] for name, build in POPULAR.items()}
    names = [
        name if maps == "exact" else f"{name} ({maps})"
        for name, maps in sorted(of_popular.items(), key=lambda pair: pair[0].lower())
    ]
    exact = list(of_popular.values()).count("exact")
    return start + table + SMALL.format(exact=exact, names=", ".join(names))


def _row(build):
    """Returns the columns of a build after its name."""
    for reason, builds in REFUSED.items():
        if build in builds:
            return (f"refused: {reason}", *5 * "-")
    captured = judged(build).captured
    verified = "own pass, W V" if captured.proof.is_verified else "own pass"
    layers = "with attention" if captured.others else "all"
    has_norms = {layer.value_norms is not None for layer in captured.layers}
    norms = "some layers" if len(has_norms) > 1 else NO_YES[has_norms.pop()]
    return "exact", verified, layers, norms, NO_YES[removes_heads(build)], NO_YES[has_parts(build)]


if __name__ == "__main__":  # PYTHONPATH=.:tests python -m helpers.families
    PAGE.write_text(page(), encoding="utf-8")
