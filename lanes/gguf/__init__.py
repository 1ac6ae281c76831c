"""GGUF files of the Llama, Qwen and Gemma families: header, tensors' blocks, configuration, weights and tokenizer."""
