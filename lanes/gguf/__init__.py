"""GGUF files of the Llama and Qwen families: header, tensors' blocks, configuration, weights and tokenizer."""
