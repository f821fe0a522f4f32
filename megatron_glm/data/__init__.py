"""From rows of text to packed batches: tokenizer, chat template, rows, packing, loader."""
