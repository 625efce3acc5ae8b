"""Make the default medium drafter: a few layers of the default target, distilled on the target's own greedy text.

    python tools/make_drafter.py text   --work runs/drafter --minutes 30     # the target writes prompts and answers
    python tools/make_drafter.py keep   --work runs/drafter --text FILE.jsonl.gz  # that text alone, without its labels
    python tools/make_drafter.py teach  --work runs/drafter --text FILE.jsonl.gz  # label answers written elsewhere
    python tools/make_drafter.py train  --work runs/drafter --minutes 60
    python tools/make_drafter.py export --work runs/drafter

tools/drafter-text.jsonl.gz is what `keep` wrote of one run: 214 thousand of the answer tokens that the shipped drafter
learned from.

Every stage can be stopped at any time and started again with the same command: text is written in whole parts, and
training continues from its last checkpoint. All of it runs on a CPU with bfloat16 matrix products; where the CPU is
shared, OMP_WAIT_POLICY=passive keeps threads from spinning, and MALLOC_MMAP_THRESHOLD_=16000000000 and
MALLOC_TRIM_THRESHOLD_=16000000000 keep glibc from giving memory back at every step.
"""

import argparse
import ast
import contextlib
import fcntl
import gzip
import json
import math
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from treegraft.runtime.models import DRAFTER_FILE, Model, fingerprint_of, load_model

LABELS = 32  # the teacher's best tokens kept at each position
ANSWER = 224  # longest answer, in tokens
SLOTS = 128  # texts generated side by side
END = 2  # <|im_end|>, which ends a message
VOCABULARY = 12288  # tokens that the drafter can propose
TRAINED = 9216  # of these, the most frequent, whose output rows are its own: what a file of 20 MB has room for
BATCH = 1024  # tokens a training step
RATE = 1.5e-3


# ---- the network: target and student are the same Llama, with different layers ----


# A layer's parameters in Block, and the target's that they hold, one below the other.
LAYER = {
    "norm1": ("input_layernorm",),
    "norm2": ("post_attention_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


class Block(nn.Module):
    """One Llama layer with fused projections. `weights` are the target's, by their Hugging Face names."""

    def __init__(self, config, weights: dict[str, torch.Tensor]):
        super().__init__()
        self.heads, self.groups, self.size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.eps = config.rms_norm_eps

        for ours, theirs in LAYER.items():
            weight = torch.cat([weights[f"{name}.weight"] for name in theirs])
            setattr(self, ours, nn.Parameter(weight.clone()))

    def forward(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], cache: "Cache | None", layer: int):
        """x (B, T, hidden) -> the same shape."""
        b, t, width = x.shape
        qkv = F.linear(F.rms_norm(x, (width,), self.norm1, self.eps), self.qkv)
        q, k, v = qkv.view(b, t, -1, self.size).split([self.heads, self.groups, self.groups], dim=2)
        q, k, v = rotate(q, rope).transpose(1, 2), rotate(k, rope).transpose(1, 2), v.transpose(1, 2)
        if cache is not None:
            cache.write(layer, k, v)
        if cache is not None and t == 1:
            # The query heads that share a key head stand as its queries, so that no key is copied.
            keys, values = cache.read(layer)
            y = F.scaled_dot_product_attention(q.view(b, self.groups, -1, self.size), keys, values, cache.mask)
        else:
            repeat = self.heads // self.groups
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + F.linear(y.reshape(b, t, -1), self.out)
        gate, up = F.linear(F.rms_norm(x, (width,), self.norm2, self.eps), self.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.down)


def rotate(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary positions on x (B, T, heads, size); rope is cos and sin, each (B or 1, T, 1, size)."""
    left, right = x.chunk(2, dim=-1)
    return x * rope[0] + torch.cat((-right, left), dim=-1) * rope[1]


class Llama(nn.Module):
    """Layers `layers` of the target, from token ids to normed hidden states; the embedding is frozen."""

    def __init__(self, target: Model, layers: list[int]):
        super().__init__()
        state, self.config = target.lm.state_dict(), target.lm.config
        self.register_buffer("embedding", state["model.embed_tokens.weight"].clone(), persistent=False)
        self.blocks = nn.ModuleList()
        for layer in layers:
            prefix = f"model.layers.{layer}."
            weights = {name.removeprefix(prefix): weight for name, weight in state.items() if name.startswith(prefix)}
            self.blocks.append(Block(self.config, weights))
        self.norm = nn.Parameter(state["model.norm.weight"].clone())

    def forward(
        self, ids: torch.Tensor, start: torch.Tensor | None = None, cache: "Cache | None" = None
    ) -> torch.Tensor:
        """ids (B, T) at positions start (B,) onwards -> hidden states (B, T, hidden)."""
        x = F.embedding(ids, self.embedding)
        positions = torch.arange(ids.shape[1])[None] + (0 if start is None else start[:, None])
        half = self.config.head_dim // 2
        speed = self.config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
        angle = (positions[..., None] * torch.cat((speed, speed)))[:, :, None]
        rope = (angle.cos().to(x.dtype), angle.sin().to(x.dtype))
        for layer, block in enumerate(self.blocks):
            x = block(x, rope, cache, layer)
        return F.rms_norm(x, x.shape[-1:], self.norm, self.config.rms_norm_eps)


# ---- text: the target writes ----


class Cache:
    """Keys and values of `slots` texts side by side; text i holds `length[i]` tokens."""

    def __init__(self, model: Llama, slots: int, size: int):
        c = model.config
        shape = (c.num_hidden_layers, slots, c.num_key_value_heads, size, c.head_dim)
        self.keys, self.values = torch.zeros(shape, dtype=model.norm.dtype), torch.zeros(shape, dtype=model.norm.dtype)
        self.length = torch.zeros(slots, dtype=torch.long)
        self.slot: int | None = None  # set while one text's prompt is read in

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """k, v (B, heads, T, size): a whole prompt into `slot`, else one token behind every text."""
        for store, new in ((self.keys, k), (self.values, v)):
            if self.slot is not None:
                store[layer, self.slot, :, : new.shape[2]] = new[0]
            else:
                store[layer, torch.arange(len(new)), :, self.length] = new[:, :, 0]

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        used = self.mask.shape[-1]
        return self.keys[layer, :, :, :used], self.values[layer, :, :, :used]

    def advance(self) -> None:
        """Make the mask (slots, 1, 1, longest + 1) for the next token of every text."""
        seen = torch.arange(int(self.length.max()) + 1)[None] <= self.length[:, None]
        self.mask = torch.zeros(seen.shape, dtype=self.keys.dtype).masked_fill_(~seen, -math.inf)[:, None, None]


@dataclass
class Text:
    """Token ids, and from position `start` on the teacher's log-probabilities of its best tokens.

    Row i of `best` (ids) and `logp`, both (len(ids) - start, LABELS), is about the token at position start + i.
    """

    ids: np.ndarray
    start: int
    best: np.ndarray
    logp: np.ndarray


def best_tokens(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and log-probabilities, each (n, LABELS), of the best tokens of logits (n, vocabulary)."""
    logits = logits.float()
    value, token = logits.topk(LABELS, dim=-1)
    return token, value - logits.logsumexp(-1, keepdim=True)


@torch.inference_mode()
def generate(model: Llama, prompts: list[list[int]], new: int, temperature: float = 0.0, seed: int = 0) -> list[Text]:
    """Continue every prompt by up to `new` tokens, greedily or (temperature > 0) sampled with top-p 0.95.

    A text ends with END. A free slot takes the next prompt at once, so that batches stay full.
    """
    noise = torch.Generator().manual_seed(seed)
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))  # like lengths together: less masked work
    slots = min(SLOTS, len(prompts))
    cache = Cache(model, slots, max(map(len, prompts)) + new)
    owner = [-1] * slots
    hidden = torch.zeros(slots, model.norm.shape[0], dtype=model.norm.dtype)
    written: list[list[tuple]] = [[] for _ in prompts]
    while True:
        for slot in range(slots):
            if owner[slot] < 0 and order:
                owner[slot] = order.pop(0)
                cache.slot = slot
                hidden[slot] = model(torch.tensor([prompts[owner[slot]]]), cache=cache)[0, -1]
                cache.slot, cache.length[slot] = None, len(prompts[owner[slot]])
        live = [slot for slot in range(slots) if owner[slot] >= 0]
        if not live:
            break
        best, logp = best_tokens(F.linear(hidden, model.embedding))
        if temperature > 0:
            p = torch.softmax(logp / temperature, dim=-1)
            p[p.cumsum(-1) - p > 0.95] = 0
            token = best.gather(1, torch.multinomial(p, 1, generator=noise))[:, 0]
        else:
            token = best[:, 0]
        chosen, best16, logp16 = token.tolist(), best.numpy().astype(np.uint16), logp.numpy().astype(np.float16)
        for slot in live:
            text = written[owner[slot]]
            text.append((chosen[slot], best16[slot], logp16[slot]))
            if chosen[slot] == END or len(text) == new:
                owner[slot] = -1
                cache.length[slot] = 0
        if any(slot_owner >= 0 for slot_owner in owner):
            cache.advance()
            hidden = model(token[:, None], cache.length, cache)[:, 0]
            cache.length += torch.tensor([int(slot_owner >= 0) for slot_owner in owner])
    texts = []
    for prompt, rows in zip(prompts, written, strict=True):
        tokens, best, logp = zip(*rows, strict=True)
        ids = np.array(prompt + list(tokens), dtype=np.uint16)
        texts.append(Text(ids, len(prompt), np.stack(best), np.stack(logp)))
    return texts


# ---- text: what it is asked ----

TOPICS = """gravity; the Roman Empire; solar panels; machine learning; sourdough bread; coral reefs; chess; jazz; the
moon; volcanoes; remote work; electric cars; climate change; photosynthesis; the French Revolution; personal
budgeting; yoga; dinosaurs; the Great Wall of China; vaccines; blockchain; Shakespeare; basketball; coffee; black
holes; gardening; dreams; public transport; online privacy; the Olympic Games; Ancient Egypt; penguins; the human
heart; democracy; inflation; renewable energy; video games; ocean currents; robots; the Renaissance; cooking rice;
marathon training; the water cycle; space travel; bees; social media; the Cold War; earthquakes; painting; mental
health; libraries; tigers; DNA; trains; the Industrial Revolution; recycling; stage fright; a job interview; a lost
dog; a small town festival; a city council election; a hospital fire; a football final; a bank robbery; a new
smartphone; a court trial; a school bus accident; a record heat wave; a missing hiker; a film premiere; a charity
concert; a factory closure; a museum theft; a royal visit; a plane crash; a drug trial; a rescue at sea; a tennis
star's comeback; a house price slump; a police investigation; sleep; an unusual friendship; time travel; a haunted
lighthouse; the first day at school; the stock market; nutrition; bicycles; World War II; the periodic table; the
Amazon rainforest; a wedding speech; customer service; team leadership; Paris; Japan; Brazil; the Sahara; Python
programming; databases; sorting algorithms; web design; probability; fractions; geometry; glaciers; electricity;
magnets; whales; elephants; owls; bread; cheese; tea; hiking; swimming; photography; poetry; opera; cinema; the
internet; airports; bridges; skyscrapers; castles; pirates; knights; detectives; aliens; superheroes; grandparents;
neighbours; moving house; learning a language; saving money; public speaking; procrastination; stress; exercise;
allergies"""

FORMS = """Write a short essay about {a}.; Explain {a} to a ten-year-old.; Explain how {a} and {b} are related.; Who
was important in the history of {a}?; Write an email to my manager about {a}.; List ten facts about {a}.; Write a
short story about {a} and {b}.; Compare {a} with {b}. Which matters more, and why?; Write a dialogue between {n} and
{m} about {a}.; What is {a}?; When did people first learn about {a}?; Where can I find out more about {a}?; Who first
wrote about {a}?; What are the advantages and disadvantages of {a}?; Give me five tips on {a}.; Write a poem about
{a}.; Imagine you are an expert on {a}. Answer a question from {n}: how do I start?; Rewrite this sentence in a formal
style: "{n} thinks that {a} is more fun than {b}."; Describe {a} in three paragraphs.; Write a headline and an opening
paragraph for an article on {a}.; Create a quiz with five questions about {a}.; Suggest a title for a book on {a} and
{b}.; Pretend to be {n}, who knows everything about {a}. Introduce yourself.; Write a persuasive speech on {a}.;
Correct the grammar: "{n} dont know nothing about {a} and he never have."; Draft a blog post on {a}. Use fewer than
200 words.; Outline a presentation on {a}, with key points.; Translate into French: "{n} wants to read about {a}.";
What does {n} need to know about {a} before talking about {b}?; Name three famous people connected with {a}.; Identify
the odd one out: {a}, {b}, {c}.; Classify these as living or not: {a}, {b}, {c}.; Make a table that compares {a}, {b}
and {c}.; Write a product review about {a}.; How many people know about {a}?; Why is {a} important?; How does {a}
work?; Generate a list of words related to {a}.; Write a letter from {n} to {m} about {a}.; What is the difference
between {a} and {b}?; Write a Python function about {a}.; Who plays {n} in the film about {a}?; When was {a}
invented?; Where does the word for {a} come from?; Tell me a joke about {a}.; Construct a sentence with the words {a}
and {b}.; Give a step by step guide to {a}.; Summarize what is known about {a}.; Evaluate this claim: "{a} will change
the future of {b}."; Write a scene in which {n} meets {m} at {a}.; How do you feel about {a}?"""

SUMS = """{n} has {x} {o}. {m} gives {n} {y} more, and then {n} loses {z} of them. How many {o} does {n} have left?;
{n} buys {y} boxes of {o}. Each box holds {x} {o} and costs ${z}. How much does {n} pay in total, and how many {o} are
there?; A shop sells {o} for ${y} each. On Monday it sells {x} of them and on Tuesday twice as many. How much money
does it make in the two days?; {n} reads {x} pages a day. {m} reads {y} pages more a day than {n}. How many pages do
they read together in {z} days?; {n} is {y} years older than {m}. In {z} years {m} will be {x}. How old is {n} now?; A
train travels {x} miles in {y} hours. How far does it travel in {z} hours at the same speed?; {n} earns ${x} an hour
and works {y} hours a week. After paying ${z} for {o}, how much is left of the week's pay?; {n} shares {x} {o} equally
among {y} friends, who each already have {z}. How many does each friend have, and how many are left over?; {x}% of the
{z}0 {o} in a basket belong to {n}, and the rest to {m}. How many {o} does {m} have?; A farmer plants {y} rows of {x}
seeds. If {z}% of the seeds fail, how many plants grow?; {n} and {m} collect {o}. {n} has {y} times as many as {m},
who has {x}. They sell {z} together. How many remain?; It takes {n} {x} minutes to walk to school and half as long to
run. How many minutes does {n} save in {y} days by running both ways?"""

NAMES = "Anna Ben Carla David Elena Farid Grace Hiro Ines Jack Kofi Laura Mateo Nina Omar Priya Rosa Tara Victor Yusuf"
OBJECTS = "apples marbles books stickers pencils cookies coins cards flowers bottles eggs tickets shells toys oranges"
OPENINGS = """What How Why Who When Where Which Can Could Write Give List Name Explain Describe Create Make Generate
Tell Find Rewrite Translate Summarize Compare Design Suggest Identify Classify Calculate Solve Convert Edit Complete
Help Imagine If Is Are Do Does I In The A My You Given Please Discuss Provide Develop Construct Draft Choose Determine
Which Should Let Arrange Tom Sarah There On At For Two John Each"""
DOCUMENTS = """Write a long and detailed news article about {a}, with names, dates and quotations.; Write the full
text of a newspaper report on {a} in {n}'s home town.; Write a long encyclopedia article about {a}.; Write a long
story about {n}, {m} and {a}.; Write a long magazine feature on {a} and {b}.; Write a detailed report by the
journalist {n} about {a}."""
TASKS = """{d}{br}Summarize the text above.; What are the key points of this article?{br}{d}; Read the text and
answer: who is mentioned in it, and what happened?{br}{d}; Write a short summary of the following article.{br}{d};
Rewrite the following text so that it is shorter.{br}{d}"""
FOLLOW_UPS = """Can you explain that in more detail?; Rewrite your previous answer as a poem.; Make it shorter.; Give
me an example.; Take your previous response and rephrase it for a child.; What would {n} say about that?; Why is that
so?; Now do the same for {a}.; List the main points of your answer.; Are you sure? Please check your answer.; How is
this related to {a}?; Translate it into Spanish."""
CODE_TASKS = """Complete the code I provided.{br}{d}; Complete the code I provided.{br}{d}; Complete this Python
function:{br}{d}; Explain what this code does.{br}{d}; Write a test for this function.{br}{d}"""


def pick(rng: random.Random, forms: str, **given: str) -> str:
    """A random one of the forms (";" stands between two), its places filled at random where `given` says nothing."""
    form = " ".join(rng.choice(forms.split(";")).split())
    a, b, c = (" ".join(topic.split()) for topic in rng.sample(TOPICS.split(";"), 3))
    n, m = rng.sample(NAMES.split(), 2)
    x, y, z = rng.randint(6, 90), rng.randint(2, 12), rng.randint(2, 15)
    places = {"a": a, "b": b, "c": c, "n": n, "m": m, "x": x, "y": y, "z": z, "o": rng.choice(OBJECTS.split())}
    return form.format(**places | {"br": "\n\n"} | given)


def library_functions() -> list[str]:
    """Signatures with docstrings of functions and methods of Python's standard library."""
    found = []
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and 20 < len(ast.get_docstring(node) or "") < 900:
                node.body, node.decorator_list = node.body[:1], []
                found.append(ast.unparse(node).replace("\\n", "\n") + "\n")
    return found


class Asker:
    """Makes the prompts (token ids) of a part; asks the target where a prompt needs text of its own.

    What the target wrote on the way stays in `sampled`: it is labelled too, so the drafter can learn from it.
    """

    def __init__(self, target: Model, model: Llama, rng: random.Random):
        self.tokenizer, self.model, self.rng = target.tokenizer, model, rng
        self.sampled: list[Text] = []

    def ids(self, *turns: str) -> list[int]:
        """The chat prompt whose turns alternate between user and assistant."""
        messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def write(self, prompts: list[list[int]], new: int, temperature: float) -> list[str]:
        """What the target says to prompts, sampled, as plain text."""
        texts = generate(self.model, prompts, new, temperature, self.rng.randrange(2**32))
        self.sampled += texts
        return [self.tokenizer.decode(text.ids[text.start :].tolist(), skip_special_tokens=True) for text in texts]

    def own(self, count: int) -> list[list[int]]:
        """User messages that the target itself makes up after an opening word."""
        words = [self.rng.choice(OPENINGS.split()) for _ in range(count)]
        head = self.ids("|").index(self.tokenizer("|").input_ids[0])
        opened = [self.ids("|")[:head] + self.tokenizer(word).input_ids for word in words]
        return [self.ids(word + rest) for word, rest in zip(words, self.write(opened, 128, 1.0), strict=True)]

    def forms(self, count: int) -> list[list[int]]:
        return [self.ids(pick(self.rng, FORMS)) for _ in range(count)]

    def sums(self, count: int) -> list[list[int]]:
        return [self.ids(pick(self.rng, SUMS)) for _ in range(count)]

    def code(self, count: int) -> list[list[int]]:
        functions = self.rng.sample(library_functions(), count)
        return [self.ids(pick(self.rng, CODE_TASKS, d=function)) for function in functions]

    def documents(self, count: int) -> list[list[int]]:
        """Three tasks on each of count / 3 long texts that the target wrote."""
        asked = [self.ids(pick(self.rng, DOCUMENTS)) for _ in range(count // 3)]
        written = [" ".join(text.split()) for text in self.write(asked, 720, 0.9)]
        tasks = ("Summarize: {d}", TASKS, TASKS)
        return [self.ids(pick(self.rng, task, d=text)) for text in written for task in tasks]

    def second_turns(self, count: int) -> list[list[int]]:
        first = [pick(self.rng, FORMS) for _ in range(count)]
        answers = self.write([self.ids(question) for question in first], 160, 0.7)
        return [self.ids(q, a, pick(self.rng, FOLLOW_UPS)) for q, a in zip(first, answers, strict=True)]


# What the parts ask, in turn, and how many answers each holds.
PARTS = (
    ("own", 512),
    ("documents", 384),
    ("forms", 384),
    ("code", 384),
    ("own", 512),
    ("documents", 384),
    ("sums", 384),
    ("second_turns", 384),
)


def save_part(path: Path, texts: list[Text]) -> None:
    """One .npz file of texts, put in place whole."""
    aside = path.with_suffix(".tmp")
    with aside.open("wb") as file:
        np.savez(
            file,
            ids=np.concatenate([text.ids for text in texts]),
            length=[len(text.ids) for text in texts],
            start=[text.start for text in texts],
            best=np.concatenate([text.best for text in texts]),
            logp=np.concatenate([text.logp for text in texts]),
        )
    aside.rename(path)


def load_part(path: Path) -> list[Text]:
    part = dict(np.load(path))
    ends, labels = part["length"].cumsum(), (part["length"] - part["start"]).cumsum()
    ids = np.split(part["ids"], ends[:-1])
    best, logp = np.split(part["best"], labels[:-1]), np.split(part["logp"], labels[:-1])
    return [Text(*fields) for fields in zip(ids, part["start"].tolist(), best, logp, strict=True)]


def write_text(work: Path, minutes: float) -> None:
    """Stage `text`: parts of prompts with the target's greedy answers, as many as `minutes` allow.

    Several processes may do this side by side (best with one thread each): a part belongs to who locks it first.
    """
    target = load_model("default", dtype="float32")
    model = Llama(target, list(range(target.lm.config.num_hidden_layers))).bfloat16()
    deadline, number = time.time() + 60 * minutes, 0
    while time.time() < deadline:
        path, began = work / "text" / f"part-{number:04d}.npz", time.time()
        kind, count = PARTS[number % len(PARTS)]
        with path.with_suffix(".lock").open("w") as lock, contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not path.exists():
                asker = Asker(target, model, random.Random(number))
                texts = generate(model, getattr(asker, kind)(count), ANSWER)
                if asker.sampled:
                    save_part(path.with_name(f"sampled-{number:04d}.npz"), asker.sampled)
                save_part(path, texts)
                tokens = sum(len(text.ids) - text.start for text in texts)
                took = time.time() - began
                print(f"{path.name}: {kind}, {len(texts)} answers, {tokens} tokens, {took:.0f} s", flush=True)
        number += 1


def keep(work: Path, path: Path) -> None:
    """Stage `keep`: write the answers of stage `text` to a .jsonl.gz file as `teach` reads it (prompt_ids, answer_ids).

    It is a hundredth of the size with labels, so that it can be kept and built upon.
    """
    count = 0
    with gzip.open(path, "wt") as file:
        for part in sorted((work / "text").glob("part-*.npz")):
            for text in load_part(part):
                ids = text.ids.tolist()
                file.write(json.dumps({"prompt_ids": ids[: text.start], "answer_ids": ids[text.start :]}) + "\n")
                count += len(text.best)
    print(f"{path}: {count} answer tokens, {path.stat().st_size} bytes")


# ---- teach and train ----


def batches(texts: list[Text], tokens: int, rng: random.Random) -> list[list[Text]]:
    """Texts of like length together, at most `tokens` tokens a batch with padding, in random order."""
    found, batch = [], []
    for text in sorted(texts, key=lambda text: len(text.ids) + rng.uniform(0, 16)):
        longest = max(len(other.ids) for other in [*batch, text])
        if batch and longest * (len(batch) + 1) > tokens:
            found.append(batch)
            batch = []
        batch.append(text)
    found.append(batch)
    rng.shuffle(found)
    return found


def pad(texts: list[Text]) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Inputs (B, T), padded on the right, and the (rows, columns) whose hidden states predict the labelled tokens."""
    ids = torch.full((len(texts), max(len(text.ids) for text in texts) - 1), END)
    rows, columns = [], []
    for row, text in enumerate(texts):
        ids[row, : len(text.ids) - 1] = torch.from_numpy(text.ids[:-1].astype(np.int64))
        columns.append(torch.arange(text.start - 1, len(text.ids) - 1))
        rows.append(torch.full_like(columns[-1], row))
    return ids, (torch.cat(rows), torch.cat(columns))


@torch.inference_mode()
def teach(work: Path, path: Path) -> None:
    """Stage `teach`: label the answers of a .jsonl or .jsonl.gz file (see `keep`) with the target's best tokens."""
    target = load_model("default", dtype="float32")
    model = Llama(target, list(range(target.lm.config.num_hidden_layers))).bfloat16()
    texts = []
    written = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    for row in map(json.loads, written.splitlines()):
        ids = np.array(row["prompt_ids"] + row["answer_ids"], dtype=np.uint16)
        texts.append(Text(ids, len(row["prompt_ids"]), np.empty(0), np.empty(0)))
    for batch in batches(texts, 8192, random.Random(0)):
        ids, where = pad(batch)
        best, logp = best_tokens(F.linear(model(ids)[where], model.embedding))
        ends = np.cumsum([len(text.ids) - text.start for text in batch])[:-1]
        for text, b, p in zip(batch, np.split(best.numpy(), ends), np.split(logp.numpy(), ends), strict=True):
            text.best, text.logp = b.astype(np.uint16), p.astype(np.float16)
    save_part(work / "text" / f"given-{path.name.split('.')[0]}.npz", texts)
    print(f"{path.name}: {len(texts)} answers labelled", flush=True)


class Student(nn.Module):
    """Some of the target's layers with an output head of their own over the draft vocabulary.

    Row i of the head scores token vocabulary[i]. The first TRAINED rows are learned, the rest are the target's.
    """

    def __init__(self, target: Model, layers: list[int], vocabulary: torch.Tensor):
        super().__init__()
        self.body = Llama(target, layers)
        rows = target.lm.get_input_embeddings().weight[vocabulary]
        self.head = nn.Parameter(rows[:TRAINED].clone())
        self.register_buffer("borrowed", rows[TRAINED:].bfloat16(), persistent=False)

    def forward(self, ids: torch.Tensor, where: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Log-probabilities (n, draft vocabulary) at n places of ids (B, T)."""
        hidden = self.body(ids)[where].bfloat16()
        logits = torch.cat((F.linear(hidden, self.head), F.linear(hidden, self.borrowed)), dim=-1)
        return logits.float().log_softmax(-1)


def draft_vocabulary(texts: list[Text]) -> torch.Tensor:
    """The VOCABULARY most frequent tokens, most frequent first; in answers they count four times as much."""
    counts = np.zeros(2**16)
    for text in texts:
        np.add.at(counts, text.ids, 1)
        np.add.at(counts, text.ids[text.start :], 3)
    return torch.from_numpy(np.argsort(-counts, kind="stable")[:VOCABULARY].copy())  # stable: early merges are common


def rows_of(vocabulary: torch.Tensor) -> torch.Tensor:
    """The head's row of every token, -1 for those outside the draft vocabulary."""
    rows = torch.full((2**16,), -1)
    rows[vocabulary] = torch.arange(len(vocabulary))
    return rows


def labels(texts: list[Text], row_of: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Head rows of the teacher's best tokens and their weights in the loss, both (n, LABELS).

    Half the weight is the teacher's distribution, half its greedy choice alone, since a draft is accepted by the
    latter. Tokens outside the draft vocabulary get no weight (and row -1).
    """
    rows = row_of[torch.from_numpy(np.concatenate([text.best for text in texts]).astype(np.int64))]
    weight = torch.from_numpy(np.concatenate([text.logp for text in texts])).float().exp() / 2
    weight[:, 0] += 0.5
    return rows, weight * (rows >= 0)


@torch.inference_mode()
def agreement(student: Student, texts: list[Text], row_of: torch.Tensor) -> tuple[float, float]:
    """Shares of answer tokens that are the student's first choice, and one of its first four."""
    first = four = total = 0
    for batch in batches(texts, 8192, random.Random(0)):
        ids, where = pad(batch)
        with torch.autocast("cpu", torch.bfloat16):
            choices = student(ids, where).topk(4).indices
        hit = choices == labels(batch, row_of)[0][:, :1]
        first, four, total = first + hit[:, 0].sum().item(), four + hit.any(1).sum().item(), total + len(hit)
    return first / total, four / total


@torch.inference_mode()
def temperature(student: Student, texts: list[Text], row_of: torch.Tensor) -> float:
    """What to divide the student's logits by, so that it gives the tokens it proposes the chances that they have."""
    tried = torch.arange(0.8, 1.6, 0.05)
    loss = torch.zeros(len(tried))
    for batch in batches(texts, 4096, random.Random(0)):
        ids, where = pad(batch)
        with torch.autocast("cpu", torch.bfloat16):
            logp = student(ids, where)
        row = labels(batch, row_of)[0][:, :1]
        logp, row = logp[row[:, 0] >= 0], row[row[:, 0] >= 0]
        for i, divisor in enumerate(tried):
            loss[i] -= (logp / divisor).log_softmax(-1).gather(1, row).sum()
    return float(tried[loss.argmin()])


def load_texts(work: Path) -> tuple[list[Text], list[Text]]:
    """All text there is now, to learn from and held out."""
    fitting, held = [], []
    for path in sorted((work / "text").glob("*.npz")):
        texts = load_part(path)
        kept = len(texts)
        if not path.name.startswith("sampled"):  # only greedy answers are what the drafter must predict
            kept -= math.ceil(0.03 * len(texts))  # from the end, since neighbours may share a document
        fitting, held = fitting + texts[:kept], held + texts[kept:]
    return fitting, held


def shipped(layers: list[int], target: Model) -> dict[str, torch.Tensor] | None:
    """The drafter that the package ships as a student's state, with its `vocabulary`; None if of another kind."""
    if not DRAFTER_FILE.exists():
        return None
    with safe_open(DRAFTER_FILE, "pt") as file:
        metadata = file.metadata()
    if metadata != {"target": fingerprint_of(target.lm, torch.float32), "layers": json.dumps(layers)}:
        return None
    tensors = load_file(DRAFTER_FILE)

    def weight(name: str) -> torch.Tensor:
        scale = tensors.get(f"{name}.scale")
        return tensors[name] if scale is None else tensors[name].float() * scale[:, None]

    state = {"vocabulary": tensors["draft_vocabulary"].long(), "head": weight("lm_head.weight")}
    state["body.norm"] = weight("model.norm.weight")
    for i in range(len(layers)):
        for ours, theirs in LAYER.items():
            parts = [weight(f"model.layers.{i}.{name}.weight") for name in theirs]
            state[f"body.blocks.{i}.{ours}"] = torch.cat(parts)
    return state


def train(work: Path, minutes: float, layers: list[int]) -> None:
    """Stage `train`: learn for `minutes` of wall time in all, from the last checkpoint if there is one.

    Without one, training goes on from the drafter that the package ships, if it has the same layers, at a third of the
    rate. Text that arrives meanwhile is used from the next epoch on.
    """
    path, target = work / "checkpoint.pt", load_model("default", dtype="float32")
    state = torch.load(path) if path.exists() else None
    begun = None if state else shipped(layers, target)
    rate = state["rate"] if state else RATE / 3 if begun else RATE
    vocabulary = (state or begun or {"vocabulary": draft_vocabulary(load_texts(work)[0])})["vocabulary"]
    row_of = rows_of(vocabulary)
    student = Student(target, layers, vocabulary)
    if begun:
        del begun["vocabulary"]
        student.load_state_dict(begun)
    adam = torch.optim.AdamW(student.parameters(), betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    step, epoch, spent = 0, 0, 0.0
    if state:
        student.load_state_dict(state["student"])
        adam.load_state_dict(state["adam"])
        step, epoch, spent = state["step"], state["epoch"], state["spent"]
    saved, tick, losses = spent, time.time(), []
    while spent < 60 * minutes:
        fitting, held = load_texts(work)
        print(f"epoch {epoch}: {len(fitting)} answers, {sum(len(text.best) for text in fitting)} tokens", flush=True)
        for batch in batches(fitting, BATCH, random.Random(step)):
            progress = min(1, spent / (60 * minutes))
            for group in adam.param_groups:
                group["lr"] = rate * min(1, (step + 1) / 100) * (1 + math.cos(math.pi * progress)) / 2
            ids, where = pad(batch)
            rows, weight = labels(batch, row_of)
            with torch.autocast("cpu", torch.bfloat16):
                logp = student(ids, where)
            loss = -(logp.gather(1, rows.clamp(min=0)) * weight).sum(1).mean()
            adam.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(student.parameters(), 1.0)
            adam.step()
            losses.append(loss.item())
            step, spent, tick = step + 1, spent + time.time() - tick, time.time()
            over = spent >= 60 * minutes
            if over or spent - saved > 180:
                saved = spent
                state = {"student": student.state_dict(), "vocabulary": vocabulary, "layers": layers, "rate": rate}
                state |= {"adam": adam.state_dict(), "step": step, "epoch": epoch, "spent": spent}
                torch.save(state, path.with_suffix(".tmp"))
                path.with_suffix(".tmp").rename(path)
                first, four = agreement(student, held if over else held[::2], row_of)
                print(
                    f"{spent / 60:.1f} min, step {step}: loss {np.mean(losses):.3f}, "
                    f"held out: top-1 {first:.3f}, top-4 {four:.3f}",
                    flush=True,
                )
                losses = []
            if over:
                break
        epoch += 1


# ---- export ----


def export(work: Path) -> None:
    """Stage `export`: the drafter as the package ships it, int8 with a float32 scale for each output channel.

    The last norm is scaled so that its probabilities are right on held-out text.
    """
    checkpoint = torch.load(work / "checkpoint.pt")
    target = load_model("default", dtype="float32")
    student = Student(target, checkpoint["layers"], checkpoint["vocabulary"])
    student.load_state_dict(checkpoint["student"])
    divisor = temperature(student, load_texts(work)[1], rows_of(checkpoint["vocabulary"]))
    print(f"logits divided by {divisor:.2f}", flush=True)
    config, state, tensors = target.lm.config, checkpoint["student"], {}

    def quantise(name: str, weight: torch.Tensor) -> None:
        scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-8) / 127
        tensors[name], tensors[f"{name}.scale"] = (weight / scale).round().to(torch.int8), scale[:, 0].clone()

    heads, groups = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    for i in range(len(checkpoint["layers"])):
        for ours, theirs in LAYER.items():
            whole = state[f"body.blocks.{i}.{ours}"]
            rows = {"qkv": [heads, groups, groups]}.get(ours, len(whole) // len(theirs))
            for name, weight in zip(theirs, whole.split(rows), strict=True):
                if weight.dim() == 1:
                    tensors[f"model.layers.{i}.{name}.weight"] = weight
                else:
                    quantise(f"model.layers.{i}.{name}.weight", weight)
    tensors["model.norm.weight"] = state["body.norm"] / divisor
    quantise("lm_head.weight", state["head"])
    tensors["draft_vocabulary"] = checkpoint["vocabulary"].int()
    metadata = {"target": fingerprint_of(target.lm, torch.float32), "layers": json.dumps(checkpoint["layers"])}
    save_file(tensors, DRAFTER_FILE.with_suffix(".tmp"), metadata)
    DRAFTER_FILE.with_suffix(".tmp").chmod(0o644)  # save_file leaves it to its owner alone
    DRAFTER_FILE.with_suffix(".tmp").rename(DRAFTER_FILE)
    print(f"{DRAFTER_FILE}: {DRAFTER_FILE.stat().st_size} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["text", "keep", "teach", "train", "export"])
    parser.add_argument("--work", type=Path, default=Path("runs/drafter"), help="folder of text and checkpoint")
    parser.add_argument("--minutes", type=float, default=60, help="wall time for `text` or `train`")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--text", type=Path, help="the file that `keep` writes and `teach` labels")
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 1, 2, 29], help="the target's layers to `train`")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    (args.work / "text").mkdir(parents=True, exist_ok=True)
    if args.stage == "text":
        write_text(args.work, args.minutes)
    elif args.stage == "keep":
        keep(args.work, args.text)
    elif args.stage == "teach":
        teach(args.work, args.text)
    elif args.stage == "train":
        train(args.work, args.minutes, args.layers)
    else:
        export(args.work)


if __name__ == "__main__":
    main()
