"""Small tokenizers made on the spot, with the special tokens of ChatML or Llama 3."""

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA3 = ("<|end_of_text|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_TEXTS = (
    "system user assistant tool you are an agent, open the door and take the key from the table",
    'a tool call looks like {"name": "open", "arguments": {"document": "doc7"}} and an answer like <answer>',
)


def word_tokenizer(words: Sequence[str], specials: Sequence[str] = CHATML) -> Tokenizer:
    """One id for each word, split at whitespace only; newlines vanish. Unknown words are id 0."""
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(("<unk>", *specials, *words)))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens(list(specials))
    return tokenizer


def byte_tokenizer(specials: Sequence[str] = CHATML, *, plain_added: Sequence[str] = (), bos: str = "") -> Tokenizer:
    """A byte-level BPE with a few merges. `bos` adds a post-processor that prepends that token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS * 3, trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain_added])
    if bos:
        template = [(bos, tokenizer.token_to_id(bos))]
        tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
            single=f"{bos} $A", special_tokens=template
        )
    return tokenizer
