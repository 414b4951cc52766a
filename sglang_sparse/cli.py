# SPDX-License-Identifier: Apache-2.0
"""`sglang-sparse`: presets, their schema, what two flags resolve to, evaluation, calibration."""

import errno
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from sglang_sparse import __version__
from sglang_sparse.config import (
    ConfigError,
    Geometry,
    available_methods,
    configs_dir,
    list_presets,
    load_preset,
    resolve_with_source,
    schema_text,
)
from sglang_sparse.config.presets import SCHEMA_FILE


class OneLine(TyperGroup):
    """Ends every command that cannot go on with one line and a failing status."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; a wrong setting or an unusable file ends it with one line."""
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            raise _fail(str(error)) from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader of a pipe has gone: click ends quietly
                raise
            where = "" if error.filename is None else f"{error.filename}: "
            raise _fail(f"{where}{error.strerror or error}") from error


app = typer.Typer(cls=OneLine, add_completion=False, no_args_is_help=True, help=__doc__)
calibrate_app = typer.Typer(no_args_is_help=True, help="Measure a model, write its presets.")
app.add_typer(calibrate_app, name="calibrate")


def _fail(message: str) -> typer.Exit:
    Console(stderr=True, soft_wrap=True).print(f"error: {message}", markup=False, highlight=False)
    return typer.Exit(2)


def _geometry(model: str) -> Geometry:
    """Return the geometry of a model under `configs/`, or of a folder with a `config.json`."""
    for ref in list_presets():
        if ref.model == model:
            shipped = load_preset(ref.model, ref.name).model
            if shipped is not None:
                return shipped
    path = Path(model) / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Geometry.from_hf_config(content, name=model)
    except (OSError, ValueError, RecursionError) as error:
        models = sorted({ref.model for ref in list_presets()} - {"generic"})
        raise ConfigError(
            flag="--model",
            value=model,
            problem=f"no geometry could be read from {path} ({type(error).__name__}: {error})",
            allowed=f"{'|'.join(models)}, or a folder with a Hugging Face config.json",
            remedy="name one of these",
        ) from error


@app.command()
def presets() -> None:
    """List the presets that ship with the package."""
    table = Table("preset", "layers, heads, dim", "layers", "score", "budget", "sparse from")
    for ref in list_presets():
        config = load_preset(ref.model, ref.name)
        shape = "any" if config.model is None else "{}, {}/{}, {}".format(*config.model.shape)
        kinds = (config.layers.kind, config.score.kind)
        held = config.retention.most_tokens
        budget = f"{config.budget.kind} {held or config.budget.amount}"
        first = "-" if held else str(config.min_sparse_tokens)
        table.add_row(str(ref), shape, *kinds, budget, first)
    # A pipe has no width: rich would fold the names that a script wants to read.
    Console(width=None if sys.stdout.isatty() else 120).print(table)


@app.command()
def schema(
    write: Annotated[bool, typer.Option(help="Write configs/schema.json instead.")] = False,
    check: Annotated[bool, typer.Option(help="Fail if configs/schema.json is stale.")] = False,
) -> None:
    """Print the JSON schema of a preset."""
    path = configs_dir() / SCHEMA_FILE
    if write:
        path.write_text(schema_text(), encoding="utf-8")
    elif check:
        if not path.is_file() or path.read_text(encoding="utf-8") != schema_text():
            raise _fail(f"{path} is stale; run `make schema`")
    else:
        typer.echo(schema_text(), nl=False)


@app.command()
def show(
    method: Annotated[str | None, typer.Option(help="As --sparse-method.")] = None,
    config: Annotated[str | None, typer.Option(help="As --sparse-config.")] = None,
    model: Annotated[
        str | None, typer.Option(help="A model under configs/, or a folder with a config.json.")
    ] = None,
) -> None:
    """Print the config that two flags resolve to, as a server would use it."""
    resolved = resolve_with_source(method, config, _geometry(model) if model else None)
    typer.echo(resolved.config.model_dump_json(indent=2))
    Console(stderr=True, soft_wrap=True).print(
        f"method {resolved.method}, from {resolved.source}, hash {resolved.hash}", highlight=False
    )


@app.command(name="eval")
def evaluate(
    base_url: Annotated[str, typer.Option(help="A running server with sparse attention.")],
    out: Annotated[
        Path, typer.Option(help="Folder of the results; an evaluation goes on in it.")
    ] = Path("eval-results"),
    tasks: Annotated[str, typer.Option(help="Names separated by commas; empty for none.")] = (
        "single_key,multi_key,multi_value,passkey"
    ),
    budgets: Annotated[
        str, typer.Option(help="In the server's unit, separated by commas; its own if empty.")
    ] = "",
    lengths: Annotated[str, typer.Option(help="Tokens, separated by commas.")] = "4096",
    count: Annotated[int, typer.Option(min=1, help="Prompts a task and length.")] = 50,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 1,
    text: Annotated[Path | None, typer.Option(help="A text file: perplexity of decoding it.")] = (
        None
    ),
    decoded: Annotated[int, typer.Option(min=2, help="Tokens of it decoded a prompt.")] = 64,
    tokenizer: Annotated[str | None, typer.Option(help="The server's own if not given.")] = None,
    lm_eval: Annotated[
        str, typer.Option(help="lm-eval tasks: names, or paths of YAML files; needs its package.")
    ] = "",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 4,
) -> None:
    """Ask a running server dense and at several budgets, and compare the answers."""
    from sglang_sparse.evaluate.command import Request, evaluate_server

    try:
        request = Request(
            base_url=base_url,
            out=out,
            budgets=_names(budgets),
            tasks=tuple(_names(tasks)),
            lengths=lengths,
            count=count,
            seed=seed,
            text=text,
            decoded=decoded,
            tokenizer=tokenizer,
            lm_eval=tuple(_names(lm_eval)),
            concurrency=concurrency,
        )
        evaluate_server(request)
    except RuntimeError as error:
        raise _fail(f"{error}; the same command goes on where this one ended") from error


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def warmup(
    context: typer.Context,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait for the server.")] = 1800,
) -> None:
    """Compile what a server's start compiles, for an image: its flags follow, no weights needed."""
    from sglang_sparse.warmup import warm_up

    try:
        seconds = warm_up(context.args, timeout=timeout)
    except RuntimeError as error:
        raise _fail(str(error)) from error
    typer.echo(f"the server was up after {seconds:.0f} s; what it compiled is kept on disk")


@app.command()
def version() -> None:
    """Print the version and the methods that have presets."""
    typer.echo(f"sglang-sparse {__version__}; methods {', '.join(available_methods())}")


@calibrate_app.command("kascade")
def calibrate_kascade(
    model: Annotated[str, typer.Option(help="A folder or hub name that transformers loads.")],
    output: Annotated[
        list[Path], typer.Option(help="Preset to write: configs/MODEL/kascade.json; repeatable.")
    ],
    report: Annotated[Path, typer.Option(help="Folder for tables and pictures.")],
    anchors: Annotated[int, typer.Option(help="Layers that select, layer 0 among them.")] = 5,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON Lines of prompts; generated ones if left out.")
    ] = None,
    count: Annotated[int, typer.Option(help="Prompts to measure on.")] = 24,
    max_tokens: Annotated[int, typer.Option(help="Tokens kept of a longer prompt.")] = 8192,
    top_k: Annotated[int, typer.Option(help="Keys a query that similarity compares.")] = 64,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks that no head map crosses.")] = 1,
    importance: Annotated[
        Literal["cosine", "effect"],
        typer.Option(
            help="A layer's weight: how far its attention turns the residual stream, as in the "
            "paper, or how far predictions move if it sees a window alone."
        ),
    ] = "cosine",
    seed: Annotated[int, typer.Option(help="Seed of the draw, or of generated prompts.")] = 0,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="auto: cuda if there is one.")
    ] = "auto",
) -> None:
    """Choose Kascade's anchors and head maps on a model; resumes if it was interrupted."""
    from sglang_sparse.calibrate.kascade import Settings, calibrate

    settings = Settings(
        model=model, prompts=prompts, anchors=anchors, outputs=output, report=report, count=count,
        max_tokens=max_tokens, top_k=top_k, tp=tp, importance=importance, seed=seed,
        device=_calibration_device(device),
    )  # fmt: skip
    layers = calibrate(settings, Console(stderr=True))
    typer.echo(f"anchors {list(layers.anchors)}; wrote {', '.join(map(str, output))}")


@calibrate_app.command("lserve")
def calibrate_lserve(
    model: Annotated[str, typer.Option(help="A folder or hub name that transformers loads.")],
    output: Annotated[
        list[Path], typer.Option(help="Preset to write: configs/MODEL/lserve.json; repeatable.")
    ],
    report: Annotated[Path, typer.Option(help="Folder for tables, gates and pictures.")],
    finder: Annotated[
        Literal["gradient", "gates"],
        typer.Option(
            help="gradient: one backward pass a prompt; gates: DuoAttention's optimisation."
        ),
    ] = "gradient",
    check: Annotated[
        Literal["none", "leave-one-out"],
        typer.Option(help="Let each head stream alone, and compare what that does."),
    ] = "none",
    gates: Annotated[
        Path | None,
        typer.Option(help="DuoAttention's TSV of gates; nothing is searched then."),
    ] = None,
    sparsity: Annotated[float, typer.Option(help="Share of the KV heads that stream.")] = 0.5,
    sink: Annotated[int, typer.Option(help="First tokens that a streaming head sees.")] = 128,
    local: Annotated[int, typer.Option(help="Last tokens that a streaming head sees.")] = 1024,
    equal_per_layer: Annotated[
        bool, typer.Option(help="Let as many heads stream in every layer.")
    ] = False,
    tp: Annotated[int, typer.Option(help="Ranks that have as many streaming heads each.")] = 1,
    steps: Annotated[int, typer.Option(help="Optimisation steps of --finder gates.")] = 200,
    l1: Annotated[float, typer.Option(help="Weight of the gates' mean in their loss.")] = 0.05,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON Lines of prompts; generated ones if left out.")
    ] = None,
    count: Annotated[int, typer.Option(help="Prompts to measure on.")] = 24,
    max_tokens: Annotated[int, typer.Option(help="Tokens kept of a longer prompt.")] = 8192,
    seed: Annotated[int, typer.Option(help="Seed of prompts and of random draws.")] = 0,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="auto: cuda if there is one.")
    ] = "auto",
) -> None:
    """Find the heads of a model that can do with a window; resumes if it was interrupted."""
    from sglang_sparse.calibrate.lserve import Settings, calibrate

    settings = Settings(
        model=model, prompts=prompts, outputs=output, report=report, finder=finder,
        sparsity=sparsity, sink=sink, local=local, check=check == "leave-one-out",
        equal_per_layer=equal_per_layer, tp=tp, steps=steps, l1=l1, count=count,
        max_tokens=max_tokens, seed=seed, device=_calibration_device(device), gates=gates,
    )  # fmt: skip
    heads = calibrate(settings, Console(stderr=True))
    streaming = sum(map(len, heads.streaming))
    typer.echo(f"{streaming} heads stream; wrote {', '.join(map(str, output))}")


def _calibration_device(device: str) -> str:
    """The device that `--device` means; ends the command if it, or matplotlib, is not there."""
    if find_spec("matplotlib") is None:
        raise _fail("the report's pictures need matplotlib: pip install 'sglang-sparse[calibrate]'")
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise _fail("--device cuda: there is none; allowed: cpu; drop --device")
    return device


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
