"""Names of the package for editors and type checkers, with the types of the plug-in that brings them."""

from asyncrl.config.schema import RunConfig as RunConfig
from asyncrl_plugins.python_api.run import Run as Run
from asyncrl_plugins.python_api.run import load as load
from asyncrl_plugins.python_api.training import train as train
