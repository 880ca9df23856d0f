// node tools/wasm.mjs PYODIDE SITE BITSANDBYTES PYTEST-ARGUMENT...
// pytest in CPython compiled to WebAssembly, on the files of this machine: nothing there starts a process or a thread.
import { realpathSync } from "node:fs";
import { pathToFileURL } from "node:url";
import { resolve } from "node:path";

const [pyodide, site, bitsandbytes, ...pytest] = process.argv.slice(2);
const { loadPyodide } = await import(pathToFileURL(resolve(pyodide, "package", "pyodide.mjs")));
const python = await loadPyodide({ stdout: console.log, stderr: console.error });
const folders = { "/repository": ".", "/site": site, "/bitsandbytes": bitsandbytes };
for (const [mounted, root] of Object.entries(folders)) {
  python.FS.mkdirTree(mounted);
  python.FS.mount(python.FS.filesystems.NODEFS, { root: realpathSync(root) }, mounted);
}
python.globals.set("arguments", python.toPy(pytest));
process.exitCode = python.runPython(`
import os, sys
os.chdir("/repository")
sys.dont_write_bytecode = True
sys.path[:0] = ["/bitsandbytes", "/repository"]
sys.path.append("/site")
import pytest
print("Python", sys.version.split()[0], "on", sys.platform)
# Without timers there is no pytest-timeout, which the configuration names.
options = ["-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestConfigWarning"]
int(pytest.main([*options, *arguments]))
`);
