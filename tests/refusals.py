"""What every refusal of bad data must look like."""

from tokens import DataError


def check_refusal(error: DataError | str, key: str, cause: str, fix: str) -> None:
    """One line `key=value: cause; fix`, no refusal inside another; of an error its exit code, of
    what a command said on stderr that it is all. `key` is what stands before the cause, `cause`
    and `fix` some of what is told."""
    if isinstance(error, DataError):
        assert error.exit_code == 3
        message = str(error)
    else:
        assert error.endswith("\n")
        message = error[:-1]
    assert "\n" not in message
    assert message.startswith(f"{key}: ")
    told_cause, _, told_fix = message.removeprefix(f"{key}: ").partition("; ")
    assert cause in told_cause
    assert f"{key.partition('=')[0]}=" not in told_cause
    assert fix in told_fix
