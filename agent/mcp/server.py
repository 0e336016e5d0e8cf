"""`kneewatch mcp`: the tools over stdio or streamable HTTP, by the protocol's own SDK. I/O edge.

Only the command imports this module, and only with the extra `mcp` installed.
"""

from __future__ import annotations

import asyncio
import ipaddress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import mcp_types as types
import uvicorn
from anyio import to_thread
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

from kneewatch.agent.api.responses import Problem
from kneewatch.agent.console import OK
from kneewatch.agent.mcp.backends import DaemonClient, MetricsSystem
from kneewatch.agent.mcp.tools import Tool, daemon_tools, instructions, metrics_system_tools
from kneewatch.agent.settings.effective import Settings
from kneewatch.collector.errors import KneewatchError, SettingsError

READ_ONLY = types.ToolAnnotations(
    read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False
)


def run(
    settings: Settings,
    *,
    daemon: str,
    prometheus: str | None,
    selector: str,
    token_file: Path | None,
    listen: str | None,
) -> int:
    """Serve until stdin is closed, or with `listen` until a signal. Returns the exit status.

    Raises:
        KneewatchError: an address or the selector is invalid.
    """
    if prometheus is not None:
        tools = metrics_system_tools(MetricsSystem(prometheus, settings, selector))
    else:
        ca_file: str | None = settings["fetch.ca_file"]
        tools = daemon_tools(DaemonClient(daemon, token_file=token_file, ca_file=ca_file))
    server = server_of(tools)
    if listen is None:
        asyncio.run(_over_stdio(server))
    else:
        host, port = _loopback(listen)
        uvicorn.run(
            server.streamable_http_app(host=host), host=host, port=port, log_level="warning"
        )
    return OK


def server_of(tools: tuple[Tool, ...]) -> Server[Any]:
    """The protocol's server of the tools."""
    by_name = {tool.name: tool for tool in tools}
    listed = types.ListToolsResult(
        tools=[
            types.Tool(
                name=tool.name,
                title=tool.title,
                description=tool.description,
                input_schema=tool.takes,
                output_schema=tool.gives,
                annotations=READ_ONLY,
            )
            for tool in tools
        ]
    )

    async def list_tools(_context: object, _params: object) -> types.ListToolsResult:
        return listed

    async def call_tool(
        _context: object, params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        tool = by_name.get(params.name)
        if tool is None:
            return _refused(f"unknown tool {params.name!r}; tools: {', '.join(by_name)}")
        return await to_thread.run_sync(_answer, tool, params.arguments or {})

    return Server(
        "kneewatch",
        version=version("kneewatch"),
        instructions=instructions(tools),
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


def _answer(tool: Tool, arguments: dict[str, Any]) -> types.CallToolResult:
    """A call's result. An error is a result as well, so that the model can correct its call."""
    try:
        jsonschema.validate(arguments, tool.takes)
        text, document = tool.answer(arguments)
    except jsonschema.ValidationError as error:
        where = "".join(f"{part}: " for part in error.absolute_path)
        return _refused(f"{where}{error.message}")
    except Problem as error:
        return _refused(error.detail)
    except KneewatchError as error:
        return _refused(str(error))
    return types.CallToolResult(
        content=[types.TextContent(type="text", text=text)], structured_content=document
    )


def _refused(reason: str) -> types.CallToolResult:
    return types.CallToolResult(
        content=[types.TextContent(type="text", text=reason)], is_error=True
    )


async def _over_stdio(server: Server[Any]) -> None:
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


def _loopback(listen: str) -> tuple[str, int]:
    """Host and port of an address on loopback: the endpoint has no tokens of its own.

    Raises:
        SettingsError: it is no such address.
    """
    host, _, port = listen.strip().rpartition(":")
    host = host.strip("[]")
    try:
        if ipaddress.ip_address(host).is_loopback and 0 <= int(port) < 65536:
            return host, int(port)
    except ValueError:
        pass
    raise SettingsError(
        f"--listen: {listen!r} is not a loopback address such as 127.0.0.1:9878; to serve other "
        "machines, put a proxy that authenticates clients in front"
    )
