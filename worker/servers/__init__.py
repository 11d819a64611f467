"""Talking to inference servers in OpenAI's form: vLLM, SGLang, llama.cpp, TensorRT-LLM and others.

    job, decision → engine → sending, with fleet: which endpoint, and whose fault a failure was → client
    job, sampling → asking.body_of → client.ServerClient.complete → reading.ReplyReader → Reply with Told counts

`forms` are the servers' own words, `told` what they say of drafts, and `refusals` makes their failures alphaloop's
errors. What asks an endpoint is an `endpoint_client.EndpointClient`; `in_process` has the one of vLLM inside this
process.
"""
