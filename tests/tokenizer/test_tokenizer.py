"""Ids, text and chat of a Hugging Face folder, against transformers on a tokenizer trained here."""

import json

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from framework.errors import CheckpointError, RequestError
from framework.interfaces import Checkpoint
from framework.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "pack my box with five dozen jugs",
    "naïve café, 1234 – 東京",
] * 5
TEXTS = [
    "", " ", "the quick brown fox", "  two  spaces\n\nand lines\t", "naïve café 東京 😀 \u0301", "1234567",
    "<s>the</s> fox", "<tool>x</tool>", "it's Bob's, isn't it ?", "a\x00b",
]  # fmt: skip
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}\n    {% if m.role == 'tool' %}{{ m.content | tojson }}\n    {% continue %}"
    "{% endif %}{% generation %}[{{ m['role'] }}] {{ m['content'] }}{% endgeneration %}{{ eos_token }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
CHAT = [{"role": "user", "content": "Hi <b>é</b>"}, {"role": "tool", "content": {"a": "é<"}}]


def trained():
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    )
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend


def save(folder, **settings):
    wrapped = PreTrainedTokenizerFast(tokenizer_object=trained(), bos_token="<s>", eos_token="</s>", **settings)
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    oracle = save(folder)
    return Tokenizer.load(folder), oracle


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_equal_transformers(text, pair):
    ours, oracle = pair
    for special in (True, False):
        ids = ours.encode(text, add_special_tokens=special)
        assert ids == oracle.encode(text, add_special_tokens=special)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == oracle.decode(ids, skip_special_tokens=skip)


def test_special_ids_and_sizes_equal_transformers(pair):
    ours, oracle = pair
    assert (ours.bos_token_id, ours.eos_token_id) == (oracle.bos_token_id, oracle.eos_token_id) == (0, 1)
    assert ours.vocab_size == len(oracle)
    assert ours.token_to_id("</s>") == 1 and ours.token_to_id("<tool>") == oracle.convert_tokens_to_ids("<tool>")
    assert ours.decode_token(10_000) == ""


def test_one_token_decodes_alone_special_or_not(pair):
    ours, _ = pair
    assert ours.decode_token(0) == "<s>"
    pieces = ours.encode("the fox", add_special_tokens=False)
    assert "".join(ours.decode_token(i) for i in pieces) == "the fox"


@pytest.mark.parametrize("tools", [None, [{"name": "é"}]])
@pytest.mark.parametrize("prompt", [True, False])
def test_chat_text_equals_transformers(tools, prompt, pair):
    ours, oracle = pair
    expected = oracle.apply_chat_template(CHAT, tools=tools, add_generation_prompt=prompt, tokenize=False)
    assert ours.apply_chat_template(CHAT, add_generation_prompt=prompt, tools=tools) == expected
    assert expected.startswith("<s>") and ("[assistant]" in expected) == prompt


@pytest.mark.parametrize("ends", [{"add_bos_token": False}, {"add_eos_token": True}], ids=str)
def test_tokenizer_json_alone_decides_what_is_added_as_in_transformers(ends, tmp_path):
    save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | ends))
    ids = Tokenizer.load(tmp_path).encode("the fox")
    assert ids == AutoTokenizer.from_pretrained(tmp_path).encode("the fox")
    assert ids[0] == 0 and ids[-1] != 1


def test_a_token_that_only_the_config_declares_keeps_its_id(tmp_path):
    save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    size = Tokenizer.load(tmp_path).vocab_size
    entry = {"content": "<late>", "special": True, "normalized": False}
    path.write_text(json.dumps(config | {"added_tokens_decoder": {str(size): entry}}))
    ours = Tokenizer.load(tmp_path)
    assert ours.encode("the<late>", add_special_tokens=False)[-1] == size
    assert ours.decode([size]) == ""
    path.write_text(json.dumps(config | {"added_tokens_decoder": {str(size + 5): entry}}))
    with pytest.raises(CheckpointError, match=rf"gives '<late>' the id {size + 5}, tokenizer.json {size}"):
        Tokenizer.load(tmp_path)


def test_truncation_and_padding_of_tokenizer_json_are_off(tmp_path):
    backend = trained()
    whole = backend.encode("the quick brown fox jumps").ids
    backend.enable_truncation(3)
    backend.enable_padding(length=40)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).encode("the quick brown fox jumps") == whole


def test_special_tokens_written_as_objects_are_read(tmp_path):
    trained().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "</s>"}, "bos_token": "<s>"})
    )
    ours = Tokenizer.load(tmp_path)
    assert (ours.bos_token_id, ours.eos_token_id) == (0, 1)


# ----------------------------------------------------------------------------------------------- templates and errors


def with_template(tmp_path, template):
    trained().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "</s>"}))
    return Tokenizer.load(tmp_path)


def test_jinja_file_stands_over_the_config(tmp_path):
    with_template(tmp_path, "config")
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer.load(tmp_path).apply_chat_template(CHAT) == "file"


def test_of_several_templates_default_is_used(tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert with_template(tmp_path, named).apply_chat_template(CHAT) == "plain"


def test_template_given_with_the_call_and_variables_are_used(tmp_path):
    ours = with_template(tmp_path, "{{ enable_thinking }}")
    assert ours.apply_chat_template(CHAT, enable_thinking=False) == "False"
    assert ours.apply_chat_template(CHAT, chat_template="{{ strftime_now('%Y') | int > 2000 }}") == "True"


def test_template_refusing_the_messages_speaks_in_its_own_words(tmp_path):
    ours = with_template(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="the chat template refuses these messages: roles must alternate"):
        ours.apply_chat_template(CHAT)


def test_template_cannot_reach_python(tmp_path):
    ours = with_template(tmp_path, "{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(RequestError, match=r"refuses these messages: .*unsafe"):
        ours.apply_chat_template(CHAT)
    with pytest.raises(RequestError, match="refuses these messages"):
        ours.apply_chat_template(CHAT, chat_template="{{ messages.append(1) }}")


def test_broken_template_and_missing_template_are_said(tmp_path):
    with pytest.raises(CheckpointError, match="chat template does not compile"):
        with_template(tmp_path, "{% if %}").apply_chat_template(CHAT)
    with pytest.raises(RequestError, match=r"the tokenizer has no chat template. Pass chat_template=TEXT"):
        with_template(tmp_path, None).apply_chat_template(CHAT)


def test_a_folder_without_tokenizer_json_says_what_to_do(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer.json: there is no such file, and other tokenizer formats"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer.json: not a readable tokenizer"):
        Tokenizer.load(tmp_path)


def test_ids_of_a_long_text_equal_transformers(pair):
    """Which is turned into ids without the interpreter's lock, by another function of the same tokenizer."""
    ours, oracle = pair
    text = "low lower lowest. " * 1000
    assert ours.encode(text) == oracle(text)["input_ids"]
    with pytest.raises(ValueError, match="character 18000 is"):
        ours.encode(text + "\ud800")


def test_unpaired_surrogates_are_refused(pair):
    with pytest.raises(RequestError, match=r"not valid Unicode: character 1 is .\\ud800., half"):
        pair[0].encode("a\ud800")


def test_checkpoint_without_a_tokenizer_has_none(tmp_path):
    assert Tokenizer.of(Checkpoint(tmp_path, "dummy", {})) is None
