"""Deploys a model with Ray Serve LLM, and asks it what a test wants to know.

    python llm_app.py ADDRESS PORT

It reads an order a line, JSON, and answers each with a line of JSON:

    {"deploy": LLMCONFIG}       serves it on PORT, and answers once that takes requests
    {"call": METHOD}            what a replica's method returns
    {"place": LLMCONFIG}        its engine_kwargs and its actor's options, once they are decided

An answer is {"is": value} or {"error": text}. It ends with whoever started it.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

SERVER = "specserve.server.ray_llm:SpecserveServer"


def main(address: str, port: int) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray says
    import ray
    from ray import serve
    from ray.serve.llm import LLMConfig, build_openai_app

    ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)

    def obey(order: dict[str, Any]) -> Any:
        match order:
            case {"deploy": config}:
                serve.start(http_options={"port": port})
                serve.run(build_openai_app({"llm_configs": [LLMConfig(**config, server_cls=SERVER)]}))
                return None
            case {"call": method}:
                handle = serve.get_deployment_handle("SpecserveServer:tiny", "default")
                found = getattr(handle, method).remote().result(timeout_s=30)
                return found.model_id if method == "llm_config" else found
            case {"place": config}:
                made = LLMConfig(**config, server_cls=SERVER)
                options = made.server_cls.get_deployment_options(made)
                return {"engine_kwargs": made.engine_kwargs, "actor": options["ray_actor_options"]}
        raise AssertionError(f"no order: {order}")

    for line in sys.stdin:
        try:
            told = {"is": obey(json.loads(line))}
        except Exception as error:  # which the test looks at
            told = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(told), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
