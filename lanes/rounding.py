"""To what numbers of rows and columns a lane's arrays and steps are rounded up. Imports no MLX."""

BUCKET_TOKENS = 256
# How finely the columns that are read follow the longest row where no shape is compiled.
READ_TOKENS = 16


def round_rows(rows: int) -> int:
    """Powers of two up to 8, then multiples of 8: few shapes, and never twice what is needed beyond a handful."""
    return 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8


def capacity_for(tokens: int) -> int:
    """Tokens to make room for: a power of two up to 4,096, beyond that a multiple of an eighth of one, so that long
    rows waste a fifth at most while growing still copies each token a bounded number of times."""
    power = max(BUCKET_TOKENS, 1 << max(tokens - 1, 0).bit_length())
    grain = power if power <= 4096 else power // 8
    return max(grain, -(-tokens // grain) * grain)


def read_width(tokens: int) -> int:
    """Columns that an eager step reads for so many tokens."""
    return -(-tokens // READ_TOKENS) * READ_TOKENS


def compiled_width(tokens: int) -> int:
    """Columns that a compiled step reads: multiples of 256, and of an eighth of the power of two above, so that at most
    an eighth is read in vain and few shapes are traced."""
    grain = max(BUCKET_TOKENS, (1 << (tokens - 1).bit_length()) // 8)
    return -(-tokens // grain) * grain
