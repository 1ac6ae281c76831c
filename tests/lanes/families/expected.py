"""What is known of the families that are not batched, or that cannot quantize their keys and values; all others can.

Reasons are patterns of what is said when the model is loaded.
"""

SERIAL = {
    "afm7": "afm7.KVReuseAttention takes the width of the arrays",
    "deepseek_v41": "no rows in slots for LayerCache",
    # Its scores have a dimension more than the mask it is given.
    "gemma2": "off by|cannot be broadcast",
    "gpt_bigcode": "rows side by side fail: ValueError: .*Only length-1 arrays",
    "internlm2 dynamic": "DynamicNTKScalingRoPE fails",
    "llama dynamic": "DynamicNTKScalingRoPE fails",
    "llama4": "no rows in slots for ChunkedKVCache",
    # Its state is the last tokens, fewer of them in a short row.
    "longcat_flash_ngram": "rows side by side fail: AssertionError: a state of",
    "minimax_m3_vl": "minimax_m3_vl.Attention takes the width of the arrays",
    "phi3small": "phi3small.Attention takes the width of the arrays",
    "recurrent_gemma": "recurrent_gemma.RGLRU makes another thing of no state",
}

_OWN_ATTENTION = "fails on quantized keys and values: (AttributeError|TypeError)"
_SINKS = "does not support attention sinks"

UNQUANTIZED = {
    **dict.fromkeys(
        (
            "afm7",
            "bailing_hybrid",
            "bailing_moe_v3",
            "deepseek_v3",
            "deepseek_v32",
            "gear",
            "gemma2",
            "gemma4",
            "gemma4_text",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "kimi_k25",
            "kimi_k3",
            "kimi_linear",
            "kimi_vl",
            "longcat_flash",
            "longcat_flash_ngram",
            "minimax_m3_vl",
            "mistral3 mistral4",
            "mistral4",
            "phi",
            "phi3small",
            "phixtral",
            "plamo",
            "plamo2",
            "stablelm",
        ),
        _OWN_ATTENTION,
    ),
    "deepseek_v41": "LayerCache has no quantized form",
    "gpt_oss": _SINKS,
    "llama4": "ChunkedKVCache has no quantized form",
    "mimo_v2_flash": _SINKS,
}

# Sparse attention takes the best keys in whatever order, and the sum with them: equal to rounding only.
ROUNDED = ("deepseek_v32", "glm_moe_dsa")
