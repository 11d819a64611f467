"""Talking to inference servers in OpenAI's form: vLLM, SGLang, llama.cpp, TensorRT-LLM and others.

    a job, its decision → engine → sending → client → http, and back: replies → a Generation
    which endpoint?       fleet, fleet_member, load        whose fault was a failure?       fleet
    what is asked?        request_body                     what did the drafts yield?       draft_counts, counters
    what is it?           identity                         is it well?                       testing, counters

`fleet`, `fleet_member`, `load` and `draft_counts` are pure; everything that waits for a server runs on the
engine's event loop.
"""
