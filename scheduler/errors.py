"""The few ways in which a client's wish is not granted. Each carries a sentence that a person can act on."""


class Refused(Exception):
    """The request cannot be served as it is: code is one of protocol.ERROR_CODES, the message says what to change."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Overloaded(Refused):
    """The request could be served, but not now: try again after retry_after_s seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__("overloaded", message)
        self.retry_after_s = retry_after_s
