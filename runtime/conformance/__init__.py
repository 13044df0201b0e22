"""Black-box conformance of endpoint pickers: does a server speak Envoy's external processing as a gateway needs it to?

`python -m runtime.conformance --target HOST:PORT` asks any endpoint picker as Envoy would, and judges its answers.
Nothing here knows the sidecar of this project; only the protocol's own messages are used.
"""
