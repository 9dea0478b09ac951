"""Edit a text: most of the answer is known beforehand, so let it be the draft. The answer stays the same."""

from specserve import LLM, SamplingParams

TEXT = (
    "The lighthouse was built in 1874 after three ships were lost in one winter. For sixty years its lamp burned whale "
    "oil. In 1934 the lamp was connected to the electricity of the town. Today it belongs to the museum."
)
MESSAGES = [{"role": "user", "content": f"Write this text again with 1874 changed to 1875:\n\n{TEXT}"}]
PARAMS = SamplingParams(max_tokens=80, temperature=0)

with LLM("smollm2-135m", num_speculative_tokens=8) as llm:
    plain = llm.chat(MESSAGES, PARAMS, drafter="none")[0].outputs[0]
    drafted = llm.chat(MESSAGES, PARAMS, prediction=TEXT)[0].outputs[0]
    assert drafted.token_ids == plain.token_ids
    print(drafted.text)  # a small model edits as it likes; drafts that it departs from are rejected
    for name, output in (("plain", plain), ("with a prediction", drafted)):
        stats = output.stats
        print(f"{name}: {len(output.token_ids)} tokens in {stats.num_steps} steps, ", end="")
        print(f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} draft tokens accepted")
