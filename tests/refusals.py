"""What every refusal of bad data must look like."""

from tokens import DataError


def check_refusal(error: DataError, key: str, cause: str, fix: str) -> None:
    """One line `key=value: cause; fix`, no refusal inside another, the exit code of bad data.
    `key` is all that stands before the cause, `cause` and `fix` some of what is told."""
    assert error.exit_code == 3
    message = str(error)
    assert "\n" not in message
    assert message.startswith(f"{key}: ")
    told_cause, _, told_fix = message.removeprefix(f"{key}: ").partition("; ")
    assert cause in told_cause
    assert f"{key.partition('=')[0]}=" not in told_cause
    assert fix in told_fix
