"""As much of a Kubernetes API server as kubectl needs to make, read, change and delete objects.

It refuses what the strict schemas refuse, gives a Job a pod, and removes what a removed Job owned.
Nothing is scheduled or run.
"""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jsonschema
import yaml
from kubernetes_orders import check, versions

Table = dict[str, Any]
Place = tuple[str, str, str]

KINDS = {
    "v1": {"Pod": "pods", "ConfigMap": "configmaps", "Secret": "secrets", "Service": "services"},
    "apps/v1": {"StatefulSet": "statefulsets"},
    "batch/v1": {"Job": "jobs"},
    "networking.k8s.io/v1": {"NetworkPolicy": "networkpolicies"},
    "monarch.pytorch.org/v1alpha1": {"MonarchMesh": "monarchmeshes"},
}
VERBS = ["create", "delete", "get", "list", "patch", "watch"]
OBJECT = re.compile(r"^/apis?/(.+?)/namespaces/([^/]+)/([^/]+)(?:/([^/]+))?(/log)?$")


class KubeApi:
    """The objects of a cluster on a port of loopback."""

    def __init__(self) -> None:
        self.objects: dict[Place, Table] = {}
        self.gone: list[Place] = []
        self.log = ""
        self._count = 0
        owner = self

        class Handler(_Handler):
            api = owner

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def names(self, plural: str) -> list[str]:
        return sorted(name for kind, _, name in self.objects if kind == plural)

    def put(self, plural: str, namespace: str, one: Table) -> Table:
        """Make an object; a Job gets a pod that runs."""
        meta = one["metadata"]
        self._count += 1
        meta |= {
            "namespace": namespace,
            "uid": f"uid-{self._count}",
            "resourceVersion": str(self._count),
            "creationTimestamp": f"2026-01-01T00:00:{self._count:02}Z",
        }
        self.objects[plural, namespace, meta["name"]] = one
        if plural == "jobs":
            self._pod_of(one, namespace)
        return one

    def remove(self, place: Place) -> Table:
        one = self.objects.pop(place)
        self.gone.append(place)
        for other, about in list(self.objects.items()):
            owners = about["metadata"].get("ownerReferences", ())
            if any(owner["uid"] == one["metadata"]["uid"] for owner in owners):
                self.objects.pop(other, None)
        return one

    def _pod_of(self, job: Table, namespace: str) -> None:
        template = job["spec"]["template"]
        meta = {
            "name": f"{job['metadata']['name']}-abcde",
            "labels": template["metadata"]["labels"],
        }
        containers = [{"name": "controller", "state": {"running": {}}, "ready": True}]
        status = {"phase": "Running", "containerStatuses": containers}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "status": status}
        self.put("pods", namespace, pod | {"spec": template["spec"]})


class _Handler(BaseHTTPRequestHandler):
    api: KubeApi
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if found := self._place():
            self._read(*found, parse_qs(url.query), log=url.path.endswith("/log"))
        else:
            self._discover(url.path)

    def do_PATCH(self) -> None:
        plural, namespace, name = self._named()
        body = yaml.safe_load(self._body())
        there = self.api.objects.get((plural, namespace, name))
        if self.headers["Content-Type"].startswith("application/apply-patch"):
            try:
                check(body, versions()[-1])
            except (jsonschema.ValidationError, AssertionError) as wrong:
                self._fail(400, str(wrong).partition("\n")[0])
                return
            self._send(self.api.put(plural, namespace, body))
        elif there is None:
            self._fail(404, f"{plural} {name} not found")
        else:
            self._send(_merged(there, body))

    def do_DELETE(self) -> None:
        self._body()
        place = self._named()
        if place not in self.api.objects:
            self._fail(404, f"{place[0]} {place[2]} not found")
            return
        self._send(self.api.remove(place))

    def _read(self, plural: str, namespace: str, name: str | None, query: Any, log: bool) -> None:
        if log:
            self._send(self.api.log, "text/plain")
            return
        if name is not None:
            one = self.api.objects.get((plural, namespace, name))
            self._send(one) if one else self._fail(404, f'{plural} "{name}" not found')
            return
        wanted = dict(
            part.split("=") for part in query.get("labelSelector", [""])[0].split(",") if part
        )
        items = [
            one
            for (kind, where, _), one in self.api.objects.items()
            if (kind, where) == (plural, namespace)
            and wanted.items() <= one["metadata"].get("labels", {}).items()
        ]
        kind = next(
            kind for kinds in KINDS.values() for kind, name in kinds.items() if name == plural
        )
        version = next(version for version, kinds in KINDS.items() if kind in kinds)
        self._send({"apiVersion": version, "kind": f"{kind}List", "metadata": {}, "items": items})

    def _discover(self, path: str) -> None:
        version = path.removeprefix("/apis/").removeprefix("/api/")
        if path == "/api":
            self._send({"kind": "APIVersions", "versions": ["v1"]})
        elif path == "/apis":
            groups = [_group(version) for version in KINDS if "/" in version]
            self._send({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
        elif version in KINDS:
            resources = [
                {
                    "name": plural,
                    "singularName": kind.lower(),
                    "namespaced": True,
                    "kind": kind,
                    "verbs": VERBS,
                }
                for kind, plural in KINDS[version].items()
            ]
            about = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version}
            self._send(about | {"resources": resources})
        elif path == "/openapi/v3":
            places = {_prefix(v): {"serverRelativeURL": f"/openapi/v3/{_prefix(v)}"} for v in KINDS}
            self._send({"paths": places})
        elif path.startswith("/openapi/v3/"):
            version = path.removeprefix("/openapi/v3/").partition("/")[2]
            self._send(_openapi(version))
        else:
            self._fail(404, f"{path} not found")

    def _place(self) -> tuple[str, str, str | None] | None:
        found = OBJECT.match(urlsplit(self.path).path)
        return (found[3], found[2], found[4]) if found else None

    def _named(self) -> Place:
        found = self._place()
        assert found is not None
        plural, namespace, name = found
        assert name is not None
        return plural, namespace, name

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _send(self, what: object, kind: str = "application/json", status: int = 200) -> None:
        body = (what if isinstance(what, str) else json.dumps(what)).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _fail(self, status: int, message: str) -> None:
        reason = {400: "BadRequest", 404: "NotFound"}[status]
        about = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status}
        self._send(about | {"message": message, "reason": reason}, status=status)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def _merged(one: Table, patch: Table) -> Table:
    for key, value in patch.items():
        if isinstance(value, dict) and isinstance(one.get(key), dict):
            _merged(one[key], value)
        else:
            one[key] = value
    return one


def _group(version: str) -> Table:
    about = {"groupVersion": version, "version": version.partition("/")[2]}
    return {"name": version.partition("/")[0], "versions": [about], "preferredVersion": about}


def _prefix(version: str) -> str:
    return f"apis/{version}" if "/" in version else f"api/{version}"


def _openapi(version: str) -> Table:
    """That objects may be sent with `fieldValidation`; kubectl asks for no more."""
    group, _, number = version.rpartition("/")
    parameters = [{"name": name, "in": "query"} for name in ("fieldValidation", "dryRun")]
    paths = {
        f"/{_prefix(version)}/namespaces/{{namespace}}/{plural}/{{name}}": {
            "patch": {
                "parameters": parameters,
                "responses": {},
                "x-kubernetes-group-version-kind": {
                    "group": group,
                    "version": number,
                    "kind": kind,
                },
            }
        }
        for kind, plural in KINDS[version].items()
    }
    return {"openapi": "3.0.0", "info": {"title": "", "version": ""}, "paths": paths}
