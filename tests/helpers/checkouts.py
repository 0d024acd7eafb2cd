"""Small models with the interfaces of nanoGPT's model.py and of the GPTModel of LLMs-from-scratch,
written for the tests: what a checkout of either would have in its file."""

NANOGPT = """
import torch
from torch import nn
from torch.nn import functional as F
class GPTConfig:
    def __init__(self, block_size, vocab_size, n_layer, n_head, n_embd, dropout, bias):
        vars(self).update(locals())
class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = c.n_head
        self.c_attn = nn.Linear(c.n_embd, 3 * c.n_embd, bias=c.bias)
        self.c_proj = nn.Linear(c.n_embd, c.n_embd, bias=c.bias)
    def forward(self, x):
        q, k, v = self.c_attn(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(x.transpose(1, 2).flatten(2))
class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c_fc = nn.Linear(c.n_embd, 4 * c.n_embd, bias=c.bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * c.n_embd, c.n_embd, bias=c.bias)
    def forward(self, x):
        return self.c_proj(self.gelu(self.c_fc(x)))
class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(c.n_embd), nn.LayerNorm(c.n_embd)
        self.attn, self.mlp = Attention(c), MLP(c)
    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))
class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(c.vocab_size, c.n_embd),
            wpe=nn.Embedding(c.block_size, c.n_embd),
            h=nn.ModuleList(Block(c) for _ in range(c.n_layer)),
            ln_f=nn.LayerNorm(c.n_embd),
        ))
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
    def forward(self, idx, targets=None):
        t = self.transformer
        x = t.wte(idx) + t.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in t.h:
            x = block(x)
        logits = self.lm_head(t.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas)
"""

LLMS = """
import torch
from torch import nn
from torch.nn import functional as F
class LayerNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))
    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.scale, self.shift)
class MultiHeadAttention(nn.Module):
    def __init__(self, size, length, heads, bias):
        super().__init__()
        self.heads = heads
        self.W_query, self.W_key, self.W_value = (nn.Linear(size, size, bias=bias) for _ in "qkv")
        self.out_proj = nn.Linear(size, size)
        self.register_buffer("mask", torch.ones(length, length))
    def forward(self, x):
        projections = self.W_query, self.W_key, self.W_value
        q, k, v = (w(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for w in projections)
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(x.transpose(1, 2).flatten(2))
class FeedForward(nn.Module):
    def __init__(self, size):
        super().__init__()
        up, down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)
        self.layers = nn.Sequential(up, nn.GELU("tanh"), down)
    def forward(self, x):
        return self.layers(x)
class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        size = cfg["emb_dim"]
        self.att = MultiHeadAttention(size, cfg["context_length"], cfg["n_heads"], cfg["qkv_bias"])
        self.ff, self.norm1, self.norm2 = FeedForward(size), LayerNorm(size), LayerNorm(size)
    def forward(self, x):
        x = x + self.att(self.norm1(x))
        return x + self.ff(self.norm2(x))
class GPTModel(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.tok_emb = nn.Embedding(cfg["vocab_size"], cfg["emb_dim"])
        self.pos_emb = nn.Embedding(cfg["context_length"], cfg["emb_dim"])
        self.trf_blocks = nn.Sequential(*[Block(cfg) for _ in range(cfg["n_layers"])])
        self.final_norm = LayerNorm(cfg["emb_dim"])
        self.out_head = nn.Linear(cfg["emb_dim"], cfg["vocab_size"], bias=False)
    def forward(self, in_idx):
        x = self.tok_emb(in_idx) + self.pos_emb(torch.arange(in_idx.shape[1]))
        return self.out_head(self.final_norm(self.trf_blocks(x)))
"""
