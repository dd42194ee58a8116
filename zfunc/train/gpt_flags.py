"""The GPT of a command's flags, and its optimizer: no torch."""

from zfunc.models.gpt_config import GPTConfig
from zfunc.optim.by_name import NamedOptimizer, make_optimizer
from zfunc.optim.elementwise import matrices_only
from zfunc.train.data.documents import holds_tokens
from zfunc.train.data.tokenizer import BYTES, open_tokenizer
from zfunc.train.settings import OPTIMIZERS, GPTFlags

GPT2_VOCAB_SIZE = 50_257


def gpt_config(settings: GPTFlags) -> GPTConfig:
    """The GPT of the settings."""
    return GPTConfig(
        vocab_size=settings.vocab_size or vocabulary(settings),
        seq_length=settings.seq_length,
        num_layers=settings.num_layers,
        hidden_size=settings.hidden_size,
        num_attention_heads=settings.num_attention_heads,
        dropout=getattr(settings, "dropout", 0.0),
    )


def planned_optimizer(settings: GPTFlags) -> NamedOptimizer:
    """An optimizer with the state of the one that `zfunc train` takes: it orders the parameters of a segment."""
    return make_optimizer(settings.optimizer, decay=matrices_only, **OPTIMIZERS[settings.optimizer][2])


def vocabulary(settings: GPTFlags) -> int:
    """The vocabulary size that `prepare_job` will find, without reading the data: GPT-2's for a file of tokens,
    else the tokenizer's, or bytes.
    """
    if settings.data is not None and holds_tokens(settings.data):
        return GPT2_VOCAB_SIZE
    return BYTES.vocab_size if settings.tokenizer is None else open_tokenizer(settings.tokenizer).vocab_size
