"""Secrets that are typed or stand in the environment, and must not get into files or jobs."""

import re
from typing import Any

MASK = "***"
SECRET_NAME = re.compile(
    r"SECRET|PASSW|PASSPHRASE|CRED|BEARER|WEBHOOK|TOKEN(?!I[SZ])"  # anywhere: PGPASSWORD, MYCREDS
    r"|(^|_)(API_?)?(KEY|PASS|PAT|AUTH|DSN|PW)S?(_|$)|[A-Z]PASS$|_PWD$",
    re.I,
)
"""Names of variables that hold secrets: WANDB_API_KEY, SSHPASS, GITHUB_PAT; not TOKENIZERS_PARALLELISM."""
SECRET_VALUE = re.compile(
    r"(?<=://)[^/@\s]+(?=@)"  # a URL with a password or a key in it
    r"|(?<=//hooks\.slack\.com/)\S+"
    r"|\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abp]-|AKIA)[\w-]{12,}"
)
"""Values that are secrets whatever the variable is called."""
_SETTING = re.compile(
    r"(^|[._])(secret|password|passwd|passphrase|credentials?|bearer|(api|access|private|secret)_?key|"
    r"token|auth|dsn|pw|pwd|pat|webhook)$",
    re.I,
)


def masked_word(word: str) -> str:
    """Return a word of a command line, `key=value`, without the secret that it holds."""
    key, equals, value = word.partition("=")
    if equals and _SETTING.search(key):
        return f"{key}={MASK}"
    return SECRET_VALUE.sub(MASK, word) if value or not equals else word


def masked_setting(key: str, value: Any) -> Any:
    """Return the value of a setting, or a mask where it is a secret."""
    if not isinstance(value, str):
        return value
    return MASK if _SETTING.search(key) else SECRET_VALUE.sub(MASK, value)
