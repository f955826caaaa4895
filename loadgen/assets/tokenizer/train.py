"""Trains the demo tokenizer from corpus.txt and writes kvlane-demo/tokenizer.json.

    pip install tokenizers==0.23.3 && python3 train.py

A byte-level BPE: every text has ids, and the ids of a text decode to it. The chat template and the special tokens'
roles are in kvlane-demo/tokenizer_config.json, which is written by hand.
"""

import pathlib

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = pathlib.Path(__file__).parent
VOCABULARY_SIZE = 2048
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

# Contractions; a word with the one sign before it; one digit; signs with their line ends; line ends; spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def main():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(SPECIAL_TOKENS),
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((HERE / "corpus.txt").read_text().splitlines(keepends=True), trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL_TOKENS])
    tokenizer.save(str(HERE / "kvlane-demo" / "tokenizer.json"), pretty=False)
    print(f"{tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main()
