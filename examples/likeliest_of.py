"""Texts of one video, the likeliest first: `python examples/likeliest_of.py URL VIDEO [COUNT]`; the URL is what
`slipstream up` prints as `http:`, with `/v1` behind it."""

import base64
import sys
from pathlib import Path

import openai


def main(url: str, video: str, count: str = "4") -> None:
    client = openai.OpenAI(base_url=url, api_key="none")
    address = "data:video/mp4;base64," + base64.b64encode(Path(video).read_bytes()).decode()
    parts = [{"type": "text", "text": "What happens?"}, {"type": "video_url", "video_url": {"url": address}}]
    asked = {"model": client.models.list().data[0].id, "messages": [{"role": "user", "content": parts}]}
    answer = client.chat.completions.create(**asked, n=int(count), temperature=0.8, logprobs=True)
    likely = {
        choice.message.content: sum(token.logprob for token in choice.logprobs.content) / len(choice.logprobs.content)
        for choice in answer.choices
    }
    for text in sorted(likely, key=likely.get, reverse=True):
        print(f"{likely[text]:.2f} {text}")


if __name__ == "__main__":
    main(*sys.argv[1:])
