#!/usr/bin/env python3
"""A CSI driver in Python, for `berth driver exec --stays --program ./image.py`: a volume is a file on a loop device, attached and raw or formatted."""
import json, os, subprocess, sys

ROOT = os.environ.get("ROOT", "/srv/image")
OPERATIONS = ["create", "delete", "grow", "node-grow", "attach", "detach", "stage", "unstage", "stats"]

class Refused(Exception):
    """An error with a code of the interface."""

def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

def path(request):
    return os.path.join(ROOT, request["id"])

def resize(request):
    os.makedirs(ROOT, exist_ok=True)
    with open(path(request), "ab") as file:
        file.truncate(max(request["capacity"], os.path.getsize(path(request))))

def device(request):
    return run("losetup", "--noheadings", "--output", "NAME", "--associated", path(request)).split("\n")[0]

def attach(request):
    if request["node"] != os.environ.get("NODE_ID", request["node"]):
        raise Refused("NOT_FOUND", "there is no such node")
    return {"context": {"image": path(request)}}

def stage(request):
    if not os.path.exists(path(request)):
        raise Refused("NOT_FOUND", "there is no such volume")
    return {"device": device(request) or run("losetup", "--find", "--show", path(request))}

def answer(request):
    match request["operation"]:
        case "describe": return {"version": 1, "name": "image.example.com", "block": True, "operations": OPERATIONS}
        case "create" | "grow": resize(request)
        case "delete":
            if os.path.exists(path(request)): os.remove(path(request))
        case "attach": return attach(request)
        case "stage": return stage(request)
        case "unstage":
            if device(request): run("losetup", "--detach", device(request))
        case "node-grow": run("losetup", "--set-capacity", device(request))
    return {}

for line in sys.stdin:
    try:
        reply = answer(json.loads(line))
    except Refused as error:
        reply = {"error": {"code": error.args[0], "message": error.args[1]}}
    except (OSError, subprocess.CalledProcessError) as error:
        reply = {"error": {"code": "INTERNAL", "message": getattr(error, "stderr", "") or str(error)}}
    print(json.dumps(reply), flush=True)
