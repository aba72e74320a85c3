"""Texts on which an imported vocabulary's fast tokenizer must agree with llama.cpp. They meet every splitting rule.

Fixed and seeded: the same file gives the same verdict everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Final

_SEED: Final = 20_26
_RANDOM_TEXTS: Final = 160

_WRITTEN: Final = (
    "Hello, world!",
    "  two spaces in front, three behind   ",
    "a\n\n\nb\r\nc\r\n\r\nd\n \n  \n\te",
    "\t\ttabs\t \tand\x0bvertical\x0cfeeds\x85next",
    "I'm sure they'LL say YOU'RE wrong, 'tis what we'd've done; rock 'n' roll's dead. 'S 'T",
    "1 12 123 1234 12345 123456 7,890.12 -0.5e10 0x1F 1_000 ½ ² ٣٤ ५ Ⅷ ①",
    "snake_case camelCase HTTPServer2XX __dunder__ $var @decorator #include <stdio.h>",
    'def f(x: int) -> str:\n    """Doc."""\n    return f"{x!r:>10}"  # comment\n\n\nclass A:\n\tpass\n',
    "for (let i = 0; i < n; i++) { a[i] ??= b?.c ?? `${d}`; } // ok\n/* x */\n#ifdef A\n#endif",
    "SELECT a.*, count(*) FROM t AS a WHERE x <> 'it''s' AND y >= 1.5;",
    '{"key": [1, 2.5, null, true], "nested": {"a": "b\\n"}}',
    "<html><body class='x'>&amp; &lt;tag/&gt;</body></html>",
    "https://example.com/a/b?c=d&e=%20f#g user@example.com C:\\dir\\file.txt ../../x",
    "naïve café Straße Ångström ŒUVRE İstanbul ǅ ﬁnal e\u0301 a\u0308 n\u0303",
    "Ελληνικά και Русский текст, українська ґ",
    "עברית: שלום עולם. العربية: مرحبا بالعالم ١٢٣",
    "हिन्दी में नमस्ते दुनिया। ไทยภาษาไทย বাংলা தமிழ்",
    "日本語のテキスト、カタカナとひらがな。中文文本，没有空格。한국어 문장입니다。ｆｕｌｌｗｉｄｔｈ",
    "😀😃 👍🏽 👨‍👩‍👧‍👦 🇺🇸🇩🇪 ❤️ ☀︎ ⌨ 1️⃣ 🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "\u00a0no-break\u2003em\u3000ideographic\u2028line\u2029paragraph\u200b\u200d\ufeffzero",
    "∑_{i=0}^{n} xᵢ² ≤ ∫₀^∞ e^{-t}dt ≈ √π/2 ± 3‰ €100 £5 ¥7 №8 §9 ©®™",
    "…—–‘quoted’ “double” «guillemets» ¿Qué? ¡Sí! 。、「」",
    "!!!???...---===***///\\\\\\|||~~~```^^^&&&%%%$$$###@@@",
    "...\n\n!!!\r\n???\n \n;;; \n",
    "a" * 300 + " " + "ab" * 150,
    " " * 100 + "x" + " " * 17 + "\n" * 40 + "y" + "\t" * 30,
    "\x00\x01\x02\x1b[31mred\x1b[0m\x7f",
    "\ufffd\uffff\U0010ffff\ue000",
    "<|endoftext|><|im_start|>user\nhi<|im_end|>\n<s>[INST] <<SYS>> </s> [/INST] <bos><eos><unk><pad>",
    "<|im_start <|im_end| |im_end|> < |im_end|> <|IM_END|>",
    "<think>\nreasoning\n</think>\n\n<tool_call>{}</tool_call>",
    "# Title\n\n- item one\n- item *two*\n  1. nested `code`\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```py\nx\n```\n",
    "MixedCASEWords withUPPER and lowerUPPERlower XMLHttpRequest iPhone15Pro",
    "word's word'S words' 'word '' ''' 'd 'll 're",
)

_PIECES: Final = (
    "the", " of", "Token", "GPU", "é", "ß", "12", "345", "'s", "'", '"', " ", "  ", "\n", "\n\n", "\t", "\r\n", ".",
    ",", "!", "-", "_", "/", "(", ")", "{", "}", "<", ">", "|", "#", "中", "文", "あ", "한", "я", "Ж", "ع", "ह", "ि",
    "😀", "\u200d", "\ufe0f", "🏽", "\u0301", "\u00a0", "\u3000", "x", "Y", "Zz", "0", "½", "€", "…",
)  # fmt: skip


def _random_texts() -> Iterator[str]:
    chance = random.Random(_SEED)  # noqa: S311  # a fixed sequence, not a secret
    for number in range(_RANDOM_TEXTS):
        length = chance.randrange(1, 80)
        if number % 4 == 3:
            # Anything from the planes that people write in.
            points = (
                chance.choice((chance.randrange(0x20, 0x250), chance.randrange(0x250, 0x1C80))) for _ in range(length)
            )
            yield "".join(map(chr, points))
        else:
            yield "".join(chance.choice(_PIECES) for _ in range(length))


TEXTS: Final = ("", *_WRITTEN, *_random_texts())


def chats() -> Iterator[list[dict[str, Any]]]:
    """Conversations of one to four turns over the corpus, with and without a system message."""
    for index in range(0, len(_WRITTEN) - 3, 2):
        first, answer, second, system = (_WRITTEN[index + offset] for offset in range(4))
        yield [{"role": "user", "content": first}]
        yield [{"role": "system", "content": system}, {"role": "user", "content": first}]
        yield [
            {"role": "system", "content": system},
            {"role": "user", "content": first},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": second},
        ]
