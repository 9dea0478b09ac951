"""Get an answer that is an object of your own type: the model can write nothing that does not fit it."""

from typing import Literal

from pydantic import BaseModel, Field

from specserve import LLM, SamplingParams


class Recipe(BaseModel):
    name: str = Field(max_length=40)
    course: Literal["starter", "main", "dessert"]
    minutes: int = Field(ge=1, le=240)
    ingredients: list[str] = Field(min_length=1, max_length=4)


with LLM("smollm2-135m") as llm:
    asked = [{"role": "user", "content": "Give me a recipe for pancakes as JSON."}]
    output = llm.chat(asked, SamplingParams(structured=Recipe, max_tokens=256, temperature=0))[0].outputs[0]
    if output.finish_reason == "length":
        raise SystemExit(f"Cut off by max_tokens: {output.text}")
    recipe = Recipe.model_validate_json(output.text)
    print(recipe)
    stats = output.stats
    jumped = stats.num_accepted_jump_forward_tokens
    print(f"{len(output.token_ids)} tokens in {stats.num_steps} steps, {jumped} of them by jump-forward")
