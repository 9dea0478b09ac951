"""Find the likeliest answers, and the likeliest that fit a JSON Schema."""

from specserve import LLM, SamplingParams

PROMPT = "A list of cities and the rivers that they lie on:\nParis - Seine\nLondon - Thames\nVienna -"
CITY = {
    "type": "object",
    "properties": {"river": {"type": "string", "maxLength": 12}},
    "required": ["river"],
    "additionalProperties": False,
}

with LLM("smollm2-135m") as llm:
    for title, params in (
        ("likeliest", SamplingParams(max_tokens=6)),
        ("likeliest as JSON", SamplingParams(max_tokens=24, structured=CITY)),
    ):
        output = llm.beam_search(PROMPT, params, beam_width=4, n=3)[0]
        print(f"{title}:")
        for answer in output.outputs:
            print(f"  {answer.score:.2f} {answer.text!r}")
