"""Jinja templates whose tags cut a conversation into chunks.

In: a template (packaged, file or string) and the values of one turn. Out: a `ChunkedPrompt`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from traceback import walk_tb
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cacheslide_agents.chunks import ChunkedPrompt, Role
from cacheslide_agents.errors import TemplateError
from cacheslide_agents.prompt.collect import ChunkTags, collecting

PACKAGE = "cacheslide_templates"
SUFFIX = ".jinja"


@dataclass(frozen=True, slots=True)
class TemplateChunk:
    """A chunk as it stands in a template. Computed parts of `id` and `message` appear as `*`.

    `message` is the role of the message around it, `None` for a chunk inside a macro.
    """

    id: str
    role: Role
    message: str | None
    line: int


class PromptTemplate:
    """A compiled template; immutable, and safe to render from several threads.

    Templates run in Jinja's immutable sandbox without autoescape; a variable that is not passed
    is an error. Values are data: whatever they contain, they cannot open or close a chunk or a
    message. `{% include %}` and `{% import %}` find files beside the template and the packaged
    templates. Every mistake is a `TemplateError` with file and line.
    """

    def __init__(self, source: str, *, task: str, path: str, folder: Path | None = None) -> None:
        self.task = task
        self.path = path
        self._source = source
        self._folder = folder
        if not source.strip():
            raise TemplateError("the template is empty", path=path)
        environment = _environment(folder)
        try:
            self._tree = environment.parse(source, path, path)
            code = environment.compile(source, path, path)
            self._template = environment.template_class.from_code(
                environment, code, environment.make_globals(None)
            )
        except jinja2.TemplateSyntaxError as error:
            raise _syntax_error(error, path) from None
        except (RecursionError, SyntaxError):  # limits of Python's own on nested code
            raise TemplateError("blocks or parentheses nest too deeply", path=path) from None
        except Exception as error:  # a number too long to be read or written, say
            raise TemplateError(f"cannot be compiled: {error}", path=path) from error

    @classmethod
    def named(cls, name: str) -> PromptTemplate:
        """A packaged template (`template_names()` has them all); its name is the task."""
        known = template_names()
        if name not in known:
            raise TemplateError(
                f"no packaged template of this name; known: {', '.join(known)}", path=name
            )
        return cls(
            (files(PACKAGE) / f"{name}{SUFFIX}").read_text("utf-8"),
            task=name,
            path=f"{name}{SUFFIX}",
        )

    @classmethod
    def from_file(cls, path: str | Path, *, task: str | None = None) -> PromptTemplate:
        """A template file in UTF-8; the task defaults to its name without suffix."""
        place = Path(path)
        try:
            raw = place.read_bytes()
        except (OSError, ValueError) as error:  # a NUL in a path is a ValueError
            reason = getattr(error, "strerror", None) or str(error)
            raise TemplateError(f"cannot read the template: {reason}", path=str(path)) from None
        try:
            source = raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start) + 1
            raise TemplateError(
                f"not UTF-8: {error.reason} (byte {raw[error.start]:#04x}); save the file as UTF-8",
                path=str(path),
                line=line,
            ) from None
        return cls(source, task=task or place.stem, path=str(path), folder=place.parent.absolute())

    @classmethod
    def from_string(cls, text: str, *, task: str = "default") -> PromptTemplate:
        return cls(text, task=task, path="<string>")

    def render(self, /, **values: Any) -> ChunkedPrompt:
        """The prompt of one turn. Raises `TemplateError` (a missing value, a duplicate id, ...)."""
        with collecting() as collector:
            try:
                text = self._template.render(values)
            except TemplateError:
                raise
            except jinja2.TemplateSyntaxError as error:
                raise _syntax_error(error, self.path) from None
            except Exception as error:
                raise self._render_error(error) from error
            return ChunkedPrompt(collector.finish(text, self.path), self.task)

    def chunks(self) -> tuple[TemplateChunk, ...]:
        """The chunks that stand in this file, in order, without rendering it."""
        return tuple(_chunks_below(self._tree, None))

    def __reduce__(self) -> tuple[partial[PromptTemplate], tuple[str]]:
        """Compiled code does not travel in a pickle: the other process compiles its own."""
        made = partial(type(self), task=self.task, path=self.path, folder=self._folder)
        return made, (self._source,)

    def _render_error(self, error: Exception) -> TemplateError:
        """Jinja puts template lines into tracebacks; the innermost one is the place."""
        path, line = self.path, None
        for frame, number in walk_tb(error.__traceback__):
            name = frame.f_code.co_filename
            if name == self.path or name.endswith(SUFFIX):
                path, line = name, number
        if isinstance(error, jinja2.UndefinedError):
            message = f"{error.message}; give the template a value for it"
        elif isinstance(error, jinja2.TemplateNotFound):
            message = f"cannot find the template {error.name!r}"
        else:
            message = f"{type(error).__name__}: {error}"
        return TemplateError(message, path=path, line=line)


def template_names() -> tuple[str, ...]:
    """Names of the packaged templates."""
    names = (entry.name for entry in files(PACKAGE).iterdir())
    return tuple(sorted(n.removesuffix(SUFFIX) for n in names if n.endswith(SUFFIX)))


def _environment(folder: Path | None) -> ImmutableSandboxedEnvironment:
    loaders: list[jinja2.BaseLoader] = [jinja2.PackageLoader(PACKAGE, "")]
    if folder is not None:
        loaders.insert(0, jinja2.FileSystemLoader(folder))
    environment = ImmutableSandboxedEnvironment(
        loader=jinja2.ChoiceLoader(loaders),
        extensions=[ChunkTags],
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["tojson"] = _to_json
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    """JSON for a prompt: unlike Jinja's own filter, nothing is escaped for HTML or sorted."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _syntax_error(error: jinja2.TemplateSyntaxError, path: str) -> TemplateError:
    return TemplateError(
        error.message or "syntax error", path=error.filename or path, line=error.lineno
    )


def _chunks_below(node: nodes.Node, message: str | None) -> Iterator[TemplateChunk]:
    for child in node.iter_child_nodes():
        call = child.call if isinstance(child, nodes.CallBlock) else None
        if call is None or not _is_tag(call):
            yield from _chunks_below(child, message)
            continue
        argument, tag = call.args[0], call.args[1].as_const()
        if tag == "message":
            yield from _chunks_below(child, _pattern(argument))
        else:
            yield TemplateChunk(_pattern(argument), Role(tag), message, child.lineno)


def _is_tag(call: nodes.Call) -> bool:
    return isinstance(call.node, nodes.ExtensionAttribute) and (
        call.node.identifier == ChunkTags.identifier
    )


def _pattern(expression: nodes.Expr) -> str:
    """What is known of a string expression before rendering: constants, and `*` for the rest."""
    if isinstance(expression, nodes.Const):
        return str(expression.value)
    if isinstance(expression, nodes.Concat):
        return "".join(_pattern(part) for part in expression.nodes)
    return "*"
