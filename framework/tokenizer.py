"""Text to token ids and back, for any checkpoint: one class over the `tokenizers` package.

Reads a Hugging Face folder (tokenizer.json and its companions) or the vocabulary of a GGUF header. Incremental
detokenisation is not here (`engine.detokenizer`), nor is any torch. Called by admission, chat and output.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from framework import gguf_vocabulary
from framework.chat_template import ChatTemplate
from framework.clean_up import clean_up
from framework.errors import CheckpointError, RequestError
from framework.interfaces import Checkpoint
from framework.pieces import pieces_of

LONG_TEXT = 4096
"""Characters from which on other threads run while a text is turned into ids."""
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """A vocabulary with its special tokens and its chat template.

    special_tokens   {"bos_token": text, ...} of the roles that are filled
    special_ids      ids of all special tokens, those of no role too
    chat_template    source text, None when the checkpoint has none
    pieces           what each token adds to a text
    clean_up_spaces  whether spaces before punctuation are closed up in decoded text
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        chat_template: str | None = None,
        *,
        clean_up_spaces: bool = False,
    ) -> None:
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template
        self.special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        self.pieces = pieces_of(backend)
        self.clean_up_spaces = clean_up_spaces
        self._backend = backend
        self._compiled: ChatTemplate | None = None
        backend.no_truncation()  # tokenizer.json may carry the limits of somebody's training
        backend.no_padding()

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Tokenizer | None:
        """The checkpoint's tokenizer, None when it has none. Raises CheckpointError when it cannot be read."""
        return None if checkpoint.tokenizer is None else cls.load(checkpoint.tokenizer)

    @classmethod
    def load(cls, source: Path | Mapping[str, Any]) -> Tokenizer:
        """From a folder with tokenizer.json, or from the `tokenizer.*` keys of a GGUF header."""
        return cls._from_gguf(source) if isinstance(source, Mapping) else _from_folder(cls, Path(source))

    @classmethod
    def _from_gguf(cls, keys: Mapping[str, Any]) -> Tokenizer:
        roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        found = {name: gguf_vocabulary.token_of(keys, role) for name, role in roles.items()}
        special = {name: token for name, token in found.items() if token is not None}
        template = _template_text("tokenizer.chat_template", keys.get("tokenizer.chat_template"))
        return cls(gguf_vocabulary.build(keys), special, template)

    # ------------------------------------------------------------------------------------------------ text and ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens spelled out in it are found. RequestError for unpaired surrogates."""
        try:
            if len(text) > LONG_TEXT:  # a batch is turned into ids without the interpreter's lock
                return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:  # what the Rust side says of text that has no UTF-8
            place = next(i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff")
            raise RequestError(
                f"the prompt is not valid Unicode: character {place} is {text[place]!r}, half of a surrogate pair. "
                "Remove it, or read the text as UTF-8."
            ) from None

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids; bytes that are no whole character become U+FFFD."""
        text = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return clean_up(text) if self.clean_up_spaces else text

    def decode_token(self, token_id: int) -> str:
        """Text of one token, special ones included; an id without a token gives an empty string."""
        return self._backend.decode([token_id], skip_special_tokens=False)

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's vocabulary may be padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    def _special_id(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else self._backend.token_to_id(token)

    # ------------------------------------------------------------------------------------------------------- chat

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Text of a chat prompt; encode it without adding special tokens, the template has them.

        chat_template  a template to use instead of the checkpoint's
        variables      whatever else the template reads, e.g. enable_thinking=False
        Raises RequestError without a template and when the template refuses the messages.
        """
        template = self._template() if chat_template is None else ChatTemplate(chat_template)
        return template.render(
            messages,
            **{
                **self.special_tokens,
                "tools": tools,
                "documents": documents,
                "add_generation_prompt": add_generation_prompt,
                **variables,
            },
        )

    def _template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise RequestError(
                "the tokenizer has no chat template. Pass chat_template=TEXT, set model.tokenizer to one that has it, "
                "or use generate with a prompt."
            )
        if self._compiled is None:
            self._compiled = ChatTemplate(self.chat_template)
        return self._compiled


# ------------------------------------------------------------------------------------------- a Hugging Face folder


def _from_folder(cls: type[Tokenizer], folder: Path) -> Tokenizer:
    """What is added around an encoded text is tokenizer.json's word alone, whatever `add_bos_token` says beside it."""
    backend = _read_backend(folder / "tokenizer.json")
    config = _read_json(folder / "tokenizer_config.json")
    special = _special_tokens(folder, config)
    _add_missing(backend, special, config)
    clean = bool(config.get("clean_up_tokenization_spaces")) and not isinstance(backend.model, tokenizers.models.BPE)
    return cls(backend, special, _chat_template(folder, config), clean_up_spaces=clean)


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise CheckpointError(
            f"{path}: there is no such file, and other tokenizer formats are not read. "
            "Convert the tokenizer to tokenizer.json, or set model.tokenizer to a folder that has it."
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust side raises plain Exception
        raise CheckpointError(f"{path}: not a readable tokenizer ({error}). Download it again.") from error


def _read_json(path: Path) -> dict[str, Any]:
    """The object in `path`, {} when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error}). Download it again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}. Download it again.")
    return value


def _text(role: str, token: Any) -> str | None:
    """A token is written as its text, or as an object that holds it."""
    text = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(text, str | None):
        raise CheckpointError(f"tokenizer_config.json: {role} must be text, got {token!r}. Download it again.")
    return text


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Texts by role: tokenizer_config.json stands over special_tokens_map.json."""
    merged = {**_read_json(folder / "special_tokens_map.json"), **config}
    texts = {role: _text(role, merged.get(role)) for role in _ROLES}
    return {role: text for role, text in texts.items() if text is not None}


def _add_missing(backend: tokenizers.Tokenizer, special: Mapping[str, str], config: Mapping[str, Any]) -> None:
    """Adds tokens that only tokenizer_config.json names, or calls special; they must keep the ids it gives them."""
    present = backend.get_added_tokens_decoder()
    for number, entry in _declared(config):
        known = present.get(number)
        if known is not None and known.content == entry["content"] and known.special == bool(entry.get("special")):
            continue
        flags = {k: bool(entry[k]) for k in ("single_word", "lstrip", "rstrip", "normalized", "special") if k in entry}
        backend.add_tokens([tokenizers.AddedToken(entry["content"], **flags)])
        if backend.token_to_id(entry["content"]) != number:
            raise CheckpointError(
                f"tokenizer_config.json gives '{entry['content']}' the id {number}, tokenizer.json "
                f"{backend.token_to_id(entry['content'])}. Use the files of one checkpoint."
            )
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    # A role's token that the vocabulary lacks gets no id: the model would have no embedding for it.
    in_vocabulary = [text for text in special.values() if text not in added and backend.token_to_id(text) is not None]
    backend.add_special_tokens(in_vocabulary)


def _declared(config: Mapping[str, Any]) -> list[tuple[int, Mapping[str, Any]]]:
    """(id, entry) of `added_tokens_decoder`, in order of the ids."""
    declared = config.get("added_tokens_decoder") or {}
    if not isinstance(declared, Mapping):
        raise CheckpointError(
            f"tokenizer_config.json: added_tokens_decoder must map ids to tokens, got {declared!r:.60}. "
            "Download it again."
        )
    for number, entry in declared.items():
        is_token = isinstance(entry, Mapping) and isinstance(entry.get("content"), str)
        if not (number.isdecimal() and is_token):
            raise CheckpointError(
                f"tokenizer_config.json: added_tokens_decoder must map ids to objects with a content, got "
                f"{number!r}: {entry!r:.60}. Download it again."
            )
    return sorted(((int(number), entry) for number, entry in declared.items()), key=lambda item: item[0])


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else the entry of tokenizer_config.json; of several named ones, `default`."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file}: not readable as text ({error}). Download it again.") from error
    found = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list) and all(isinstance(entry, Mapping) for entry in found):
        found = {entry.get("name"): entry.get("template") for entry in found}.get("default")
    return _template_text(f"{folder}: chat_template", found)


def _template_text(name: str, found: Any) -> str | None:
    if not isinstance(found, str | None):
        raise CheckpointError(f"{name} must be text or a list of named texts, got {found!r:.60}. Download it again.")
    return found
