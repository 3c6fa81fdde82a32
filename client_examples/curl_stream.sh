#!/usr/bin/env bash
# Stream one answer over HTTP with curl; each line is `data: ` and a JSON object with the next piece of text.
#
#     client_examples/curl_stream.sh [--url http://localhost:8000] [--model llm] "The capital of France is"
set -euo pipefail

url=http://localhost:8000
model=llm
while [[ ${1-} == --* ]]; do
    case $1 in
        --url) url=${2:?--url needs a value} ;;
        --model) model=${2:?--model needs a value} ;;
        *) echo "unknown option $1" >&2; exit 2 ;;
    esac
    shift 2
done
prompt=${1:?a prompt is needed}

# JSON wants these escaped; `jq -n --arg` does it for any text.
prompt=${prompt//\\/\\\\}
prompt=${prompt//\"/\\\"}
prompt=${prompt//$'\n'/\\n}

curl --no-buffer --silent --show-error --fail-with-body "$url/v2/models/$model/generate_stream" \
    --data "{\"text_input\": \"$prompt\", \"stream\": true, \"max_tokens\": 32, \"temperature\": 0}"
