"""What can go wrong, in the user's words. Every message says what, where, and what to do about it."""


class QuantkitError(Exception):
    """Base of everything quantkit raises on purpose.

    The command line prints it without a traceback, exit code 1.
    """


class RequestError(QuantkitError):
    """The request itself is wrong (an option, a name, a combination). Exit code 2."""


class WorkFolderError(RequestError):
    """A work folder holds what quantkit does not write: nothing of it is believed, and nothing removed."""


class SourceError(QuantkitError):
    """A model, text or checkpoint cannot be read: missing, truncated, inconsistent."""


class UnsupportedModel(QuantkitError):
    """The structure of a model is one that quantkit does not handle; refused by name, never guessed."""


class NumericsError(QuantkitError):
    """A value that cannot be quantized honestly: NaN weights, too many non-finite activations."""


class CheckpointError(QuantkitError):
    """A quantized checkpoint is damaged, incomplete, or was written wrongly (found by reading it back)."""


class MissingExtra(QuantkitError):
    """An optional library is not installed; the message names the extra that brings it."""

    def __init__(self, library: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the library '{library}'. Install it with: pip install 'quantkit[{extra}]'")


class QuantkitWarning(UserWarning):
    """Something was done otherwise than expected, and goes on. The command line prints it as a note.

    For example: a file's meaning taken for its words, a slower way to decode.
    """
