"""Stream a conversation with an engine inside this process: text as it comes, then how fast it came."""

from specserve import LLM, SamplingParams

QUESTIONS = ("Name one river in Europe.", "Which countries does it flow through?")

with LLM("smollm2-135m", drafter="ngram") as llm:
    messages = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        print(f"> {question}")
        answer = ""
        for chunk in llm.stream_chat(messages, SamplingParams(max_tokens=48, temperature=0)):
            print(chunk.text, end="", flush=True)
            answer += chunk.text
        stats = chunk.stats  # of the last chunk
        seconds = stats.finished - stats.first_token
        print(f"\n[{stats.mean_acceptance_length:.2f} tokens a step, {seconds:.2f} s after the first token]")
        messages.append({"role": "assistant", "content": answer})
