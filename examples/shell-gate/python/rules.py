"""What a command's text says by itself. The lists are those of ../rust/src/rules.rs."""

import re

# Parts of commands that destroy whatever surrounds them.
DESTROYS = ["rm -rf /", "rm -fr /", "rm -rf ~", "rm -rf *", "--no-preserve-root", "mkfs", "wipefs", "of=/dev/",
            "> /dev/sd", ":(){", "drop database", "shred "]

ASKS = ("explain", "what", "why", "how", "describe", "tell me")

# No sign may chain, redirect or substitute, and a quote inside would end the string early.
READS = re.compile(r'\s*\{\s*"(command|cmd)"\s*:\s*"\s*(ls|cat|pwd|head|tail|wc|grep|stat|whoami|git status)'
                   r'( [^";|&><`$\n\\]*)?"\s*\}\s*')


def destroys(text: str) -> bool:
    """Whether the text holds a command that destroys: spaces counted once, letters in any case, and backslashes left out,
    since JSON and shells both let them stand before letters that need none."""
    plain = " ".join(text.replace("\\", "").split()).lower()
    return any(part in plain for part in DESTROYS)


def orders_destruction(text: str) -> bool:
    """Whether a short text orders what destroys. A long one may quote it, in a log or a file, and one that asks about it
    does no harm: both are left to the questions."""
    return len(text.encode()) <= 200 and destroys(text) and not text.lstrip().lower().startswith(ASKS)


def only_reads(arguments: str) -> bool:
    """Whether a tool call's arguments, {"command": "…"} and nothing else, hold one command that only reads."""
    return READS.fullmatch(arguments) is not None
